"""Reference trainer, tiny inference engine and demo model for replaybuf: the part that needs torch.

Everything here is a client of the public API; the core never imports it. The commands `replaybuf train`, `engine` and
`init-model` are registered by entry point in `replaybuf_trainer.cli`.
"""
