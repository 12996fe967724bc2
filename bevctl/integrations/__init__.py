"""Our parts in models of other projects."""
