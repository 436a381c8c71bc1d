"""Engine for states that decay by a scalar: S_t = e^{g_t} S_{t-1} + k_t v_t^T (docs/math.md, section 2)."""
