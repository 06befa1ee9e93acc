"""From a teacher's outputs to students.

- The run: :mod:`rbm.distillation.distill` is the main job, :mod:`rbm.distillation.finish` writes its files, and
  :mod:`rbm.distillation.result` is what it returns. :mod:`rbm.distillation.run_graph` finds its graph again, and
  :mod:`rbm.distillation.run_inputs` refuses to resume it on another one.
- Methods: :mod:`rbm.distillation.registry` lists them, ``methods/`` has a file for each, and
  :mod:`rbm.distillation.task` is what they get and return.
- Training: :mod:`rbm.distillation.trainer`, :mod:`rbm.distillation.batches`, :mod:`rbm.distillation.adversarial`,
  :mod:`rbm.distillation.experts`.
- Soft labels: :mod:`rbm.distillation.soft_targets`, :mod:`rbm.distillation.reliability`,
  :mod:`rbm.distillation.neighbor_labels` and :mod:`rbm.distillation.source` (what ``auto`` settings decide).
- Results: :mod:`rbm.distillation.verdict`, :mod:`rbm.distillation.sentences`, :mod:`rbm.distillation.summary`,
  :mod:`rbm.distillation.latency`, :mod:`rbm.distillation.result_files` (reads them again), and ``report/``, the page of
  a run.
- ``auto/`` searches for teacher, encodings, student and settings before a run.
"""
