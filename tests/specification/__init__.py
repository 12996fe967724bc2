"""Parts of the model against small references in float64, written from the published description alone."""
