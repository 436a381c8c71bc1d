"""One graph of a chunk's step and its derivatives, what is kept of every chunk, and the stages that compute it."""
