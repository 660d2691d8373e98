"""One run on its leader: decisions of the kernel are made durable here, in the order of the ledger."""
