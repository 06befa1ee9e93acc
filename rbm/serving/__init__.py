"""From a run folder to production: predictions over files, export to one file, latency, and an HTTP server.

- Files: :mod:`rbm.serving.prediction` for one file and :mod:`rbm.serving.folders` for a folder of them; their rows come
  from :mod:`rbm.serving.feature_files`, and encodings of nodes from :mod:`rbm.serving.neighbors`.
- Export: :mod:`rbm.serving.export`, by way of :mod:`rbm.serving.standard_ops`.
- Latency: :mod:`rbm.serving.latency`. HTTP: ``server/``.
"""
