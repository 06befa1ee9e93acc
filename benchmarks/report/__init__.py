"""Reports from results: tables, plots, summaries, regressions."""
