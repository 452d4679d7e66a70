"""Who does which steps of a video, on measured costs, and how long a number of GPUs takes. Pure code without torch."""
