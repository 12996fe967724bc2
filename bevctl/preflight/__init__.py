"""Before a run starts: will it start, run in the asked precision, fit, and be able to save?"""
