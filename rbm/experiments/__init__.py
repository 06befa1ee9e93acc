"""Many runs: experiments, their result rows, tables, plots and searches."""
