"""From a table of numbers to a normalised density and to scores of anomalies, with defaults that need no tuning."""
