"""Kernels of vector states, h_t = e^{g_t} h_{t-1} + x_t, of HGRN and the RG-LRU."""
