"""A small inference engine that answers the part of the vLLM API that a generator and a trainer need."""
