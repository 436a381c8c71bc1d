"""Engine for delta rules with or without a scalar gate: S_t = e^{g_t} S_{t-1} + beta_t k_t e_t^T with the errors
e_t = v_t - k_t e^{g_t} S_{t-1} (docs/math.md, section 7)."""
