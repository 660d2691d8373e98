"""`replaybuf generate`: an asyncio daemon that turns tickets into scored groups.

Its seams are protocols: `engines.Engine` samples, `environments.Environment` scores, `stages.Stage` adds columns.
"""
