"""``rbm predict``, ``export``, ``latency`` and ``serve``."""

import math
from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.errors import THE_SAME, goes_on_by
from rbm.cli.options import Device, Run, console, status, usable_device

MethodName = Annotated[str | None, typer.Option(help="Whose student of the run (default: the one that it keeps).")]
Quantize = Annotated[str | None, typer.Option(help="int8: weights of 8 bits (default: float32).")]


def predict(
    run: Run,
    features: Annotated[
        Path,
        typer.Argument(
            help=".npy, .npz (array x, or scipy.sparse.save_npz), .csv or .parquet, one row a node; or a folder of"
            " .parquet files."
        ),
    ],
    nodes: Annotated[
        Path | None,
        typer.Option(help=".npy or .csv, [B]: of each row its node in the training graph; all: all nodes in order."),
    ] = None,
    neighbors: Annotated[
        Path | None, typer.Option(help=".npy or .csv, [M, 2]: a row, and a node of the training graph joined to it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .csv or .parquet (class and probability) or .npy (all) (default: predictions.csv);"
            " for a folder a folder (default: predictions)."
        ),
    ] = None,
    method: MethodName = None,
    quantize: Quantize = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="A folder's files side by side: the cluster of RAY_ADDRESS, or this machine.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Of --ray (default: one for each processor).")] = None,
) -> None:
    """Predict classes for rows of features with a student of a run folder; files may be larger than memory.

    A folder of .parquet files is answered file by file, into a folder; the same command goes on where it was killed.
    """
    from rbm.serving.prediction import predict_file

    joined = {"nodes": nodes, "neighbors": neighbors, "method": method, "quantize": quantize, "console": status}
    if features.is_dir() or ray:
        from rbm.serving.folders import predict_folder

        out = Path("predictions") if out is None else out
        with goes_on_by(THE_SAME):
            rows = predict_folder(run, features, out, ray=ray, workers=workers, **joined)
    else:
        if workers is not None:
            raise ValueError(
                f"workers: got {workers} for one file; leave it out, or name a folder of files and add --ray"
            )
        out = Path("predictions.csv") if out is None else out
        rows = predict_file(run, features, out, **joined)
    console.print(f"{rows} predictions written to {out}", highlight=False)


def export(
    run: Run,
    format_: Annotated[
        str, typer.Option("--format", help="torch-export, aoti (compiled here, for this processor) or onnx.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write (default: student.pt2 or .onnx in RUN).")] = None,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Write a student of a run folder to one file that needs nothing of this package, for any batch size."""
    from rbm.serving.export import export_student

    with status.status(f"{format_}: written, and compared with the student"):
        path = export_student(run, format_, out, method=method, quantize=quantize)
    console.print(f"{path}: {path.stat().st_size:,} bytes, answers as the student of {run} does", highlight=False)


def latency(
    run: Run,
    root: Annotated[str | None, typer.Option(help="Folder of the dataset's raw files (default: the run's).")] = None,
    batch_sizes: Annotated[str, typer.Option(help="How many nodes are asked for at once.")] = "1,64,4096",
    repeats: Annotated[int, typer.Option(help="Calls of each kind; fewer where they take over ten seconds.")] = 200,
    device: Device = None,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Time a run's student, an MLP and the teacher on the run's own graph; latency.json and .png go into its folder."""
    from rbm.experiments.plots import plot_latency
    from rbm.serving.latency import latency_table, measure_run
    from rbm.training.run_files import file_of, list_file

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise ValueError(f"batch-sizes: got {batch_sizes!r}, expected whole numbers such as 1,64,4096") from error
    found = measure_run(
        run,
        root=root,
        batch_sizes=sizes,
        repeats=repeats,
        device=usable_device(device),
        method=method,
        quantize=quantize,
        console=status,
    )
    data, picture = (run / file_of(name, method, quantize) for name in ("latency.json", "latency.png"))
    list_file(picture)
    plot_latency(found["rows"], picture, title=f"{found['dataset']}, threads: {found['threads']}")
    console.print(latency_table(found))
    console.print(f"{data}, {picture}", highlight=False)


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Of a forward; more than one pays for large requests.")
    ] = 1,
    max_body: Annotated[float, typer.Option(help="MiB of a request's body.")] = 8.0,
    max_rows: Annotated[int, typer.Option(help="Rows of a request, and of a forward.")] = 4096,
    max_queue: Annotated[int, typer.Option(help="Rows that wait for a forward; more hear 503.")] = 16384,
    max_connections: Annotated[int, typer.Option(help="Connections at once; more hear 503.")] = 512,
    timeout: Annotated[float, typer.Option(help="Seconds to send a head, a body, or to take an answer.")] = 10.0,
    grace: Annotated[float, typer.Option(help="Seconds to finish what is in flight, after SIGTERM.")] = 10.0,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Serve a student of a run folder over HTTP; SIGHUP reads the folder anew, SIGTERM finishes and stops."""
    from rbm.serving import server

    # In bytes it is a whole number, which infinity and NaN are not.
    if not 0 < max_body < math.inf:
        raise ValueError(f"max-body: got {max_body}, expected a finite number of MiB above 0")
    server.serve(
        run,
        method=method,
        quantize=quantize,
        host=host,
        port=port,
        threads=threads,
        limits=server.Limits(int(max_body * 2**20), max_rows, max_queue, max_connections, timeout, grace),
        tell=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
