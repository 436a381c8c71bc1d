"""Models of other libraries on sequences that are cut over ranks. The libraries are imported when they are used.

`flexsp/integrations/transformers/` runs a model's own code. A mixer of transformers calls functions that are globals
of its module. `parallelize` gives a mixer object a copy of its forward with other globals
(`flexsp/integrations/transformers/seams.py` has the table). A `Shard` passes through all layers as a keyword argument:
transformers passes unknown ones on, and a checkpointed layer gets it again in the backward pass, on any thread. A call
without a `Shard` runs the original forward. The head computes the loss in blocks inside one call of its module, so that
hooks which gather its parameters run once, however many blocks a rank has.

`flexsp/integrations/fla/` does the same for flash-linear-attention, whose layers pass no unknown arguments on. So a
layer's forward stores the ranks and documents for its thread (`on_ranks` in `flexsp/integrations/fla/functions.py`),
and the functions and modules that it calls read them there. The code of the other integration runs the model around
the layers (`flexsp/integrations/transformers/causal.py`).
"""

from flexsp.integrations import fla, transformers

__all__ = ["fla", "transformers"]
