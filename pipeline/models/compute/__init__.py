"""How a model computes: its options, the memory that it takes, and what lies on the device."""
