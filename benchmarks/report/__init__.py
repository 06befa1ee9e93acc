"""Results read back: tables, plots, summaries, regressions."""
