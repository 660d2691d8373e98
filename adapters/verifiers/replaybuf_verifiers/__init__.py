"""Tasksets of verifiers for `replaybuf generate`: their tasks as prompts, their rewards as an environment.

=============  ==============================================================
`tasks`        tasks as rows of prompts
`environment`  rewards of replies and of plays
`process`      the generator's end of the process that has verifiers
`worker`       that process, which may run in an interpreter without replaybuf
=============  ==============================================================
"""

from replaybuf_verifiers.environment import Verifiers
from replaybuf_verifiers.tasks import Tasks

__all__ = ["Tasks", "Verifiers"]
