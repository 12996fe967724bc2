"""Why a run misbehaves: one file a topic."""
