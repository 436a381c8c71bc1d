"""Models of other libraries on sequences that are cut over ranks. The libraries are imported when they are used.

`flexsp/integrations/transformers/` runs a model's own code. A mixer of transformers calls functions that are globals
of its module, so `parallelize` gives this one mixer a copy of its forward whose globals are others
(`flexsp/integrations/transformers/seams.py` is the table). A `Shard` travels as a keyword argument through all
layers: transformers hands unknown ones on, and a checkpointed layer gets it again in the backward pass, on any
thread. A call that brings none runs the original forward. The head computes the loss in blocks inside one call of the
module, so that hooks which gather its parameters run once, however many blocks a rank has.

`flexsp/integrations/fla/` does the same to flash-linear-attention, whose layers hand their functions no unknown
arguments. So a layer's forward says where the shard lies (`on_ranks` in `flexsp/integrations/fla/functions.py`), for
the thread it runs on, and the functions and modules that it calls look there. The model around the layers is run by
the code of the other integration (`flexsp/integrations/transformers/causal.py`).
"""

from flexsp.integrations import fla, transformers

__all__ = ["fla", "transformers"]
