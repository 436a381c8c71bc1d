"""`flexsp plan`: memory and step time of a model of transformers on some GPUs, before anything is launched."""
