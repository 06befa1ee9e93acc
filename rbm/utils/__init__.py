"""Files, caches, progress bars, processes. Other folders import from this one, which imports from none of them.

- Files: :mod:`rbm.utils.files`, :mod:`rbm.utils.tensor_files`, :mod:`rbm.utils.arrays`, :mod:`rbm.utils.cache`,
  :mod:`rbm.utils.locks`, :mod:`rbm.utils.chunks`, :mod:`rbm.utils.figures`.
- Processes: :mod:`rbm.utils.distributed`, :mod:`rbm.utils.parallel`, :mod:`rbm.utils.cluster`,
  :mod:`rbm.utils.interruptions`.
- Runs: :mod:`rbm.utils.progress`, :mod:`rbm.utils.console`, :mod:`rbm.utils.timings`, :mod:`rbm.utils.repeatable`,
  :mod:`rbm.utils.precision`, :mod:`rbm.utils.studies`, :mod:`rbm.utils.environment`, :mod:`rbm.utils.plugins`,
  :mod:`rbm.utils.defaults`.
- Messages: :mod:`rbm.utils.arguments`, :mod:`rbm.utils.suggestions`.
"""
