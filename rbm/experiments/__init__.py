"""Series of runs: experiments, their result rows, tables, plots and searches.

:mod:`rbm.experiments.experiment` defines the runs of an experiment, :mod:`rbm.experiments.runner` makes them, and
:mod:`rbm.experiments.results` reads and writes their rows. Tables and plots of rows are in
:mod:`rbm.experiments.tables`, :mod:`rbm.experiments.paper_tables`, :mod:`rbm.experiments.seeds`,
:mod:`rbm.experiments.comparisons` and :mod:`rbm.experiments.plots`; :mod:`rbm.experiments.statistics` has the tests
that they print.
:mod:`rbm.experiments.analysis` measures sizes, times and specialisation. ``tuning/`` searches for settings.
"""
