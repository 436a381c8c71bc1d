"""What mLSTM does around the engine for scalar decays: its stabilised gates and its quotients."""
