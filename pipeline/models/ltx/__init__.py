"""LTX-2 (2.3 and 2.5), by diffusers' LTX2ConditionPipeline: videos with sound, in one stage or in two."""
