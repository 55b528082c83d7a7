"""Model families, the table of their parameters and the rules of layouts. Only `models.sharding` loads torch."""
