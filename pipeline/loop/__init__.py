"""The loop of one rank: receive, denoise, pass on."""
