"""Several processes that train one model: `replaybuf train --fsdp` under torchrun."""
