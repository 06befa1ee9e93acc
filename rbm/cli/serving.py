"""``rbm predict``, ``export``, ``latency`` and ``serve``."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rbm.cli.errors import advise_resuming
from rbm.cli.options import Device, Run, console, status, usable_device
from rbm.utils.console import print_line, print_table

MethodName = Annotated[str | None, typer.Option(help="Student to use, by its method (default: the one the run keeps).")]
Quantize = Annotated[str | None, typer.Option(help="int8 for 8-bit weights (default: float32).")]


def predict(
    run: Run,
    features: Annotated[
        Path | None,
        typer.Argument(
            help="Features, one row per node: .npy, .npz (array x, or scipy.sparse.save_npz), .csv or .parquet; or a"
            " folder of .parquet files."
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            help="Instead of FEATURES: a graph (.npz, .pt or a folder, as for rbm distill) that contains the training"
            " graph and has grown since; predicts all its nodes."
        ),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help=".npy or .csv file [B]: for each row, its node in the training graph (in a .csv, its id if nodes have"
            " ids); or the word all, if the rows are all nodes in order."
        ),
    ] = None,
    neighbors: Annotated[
        Path | None,
        typer.Option(help=".npy or .csv file [M, 2]: pairs of a row and its neighbour in the training graph."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .csv or .parquet (class and its probability) or .npy (all probabilities) (default:"
            " predictions.csv). For a folder of features, a folder (default: predictions)."
        ),
    ] = None,
    method: MethodName = None,
    quantize: Quantize = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Process a folder's files in parallel on the RAY_ADDRESS cluster or this machine."),
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Workers for --ray (default: one per processor).")] = None,
    root: Annotated[
        str | None,
        typer.Option(help="Folder with the raw files of the run's dataset, for --graph (default: the run's)."),
    ] = None,
) -> None:
    """Predict the class of each row of a features file, which may be larger than memory, or of each node of a graph.

    For a folder of .parquet files, one file is written per input file; the same command continues a killed run.
    """
    if graph is not None:
        from rbm.serving.grown_graph import predict_graph

        given = {"features": features, "nodes": nodes, "neighbors": neighbors, "ray": ray or None, "workers": workers}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"graph: got {graph} together with {', '.join(named)}; leave one of them out")
        out = Path("predictions.csv") if out is None else out
        rows = predict_graph(run, graph, out, root=root, method=method, quantize=quantize, console=status)
        print_line(console, f"{rows} predictions written to {out}")
        return
    if features is None:
        raise ValueError("features: got none, expected a file or folder of features, or a graph with --graph")
    if root is not None:
        raise ValueError(f"root: got {root} without --graph; leave it out")
    joined = {"nodes": nodes, "neighbors": neighbors, "method": method, "quantize": quantize, "console": status}
    if features.is_dir() or ray:
        from rbm.serving.folders import predict_folder

        out = Path("predictions") if out is None else out
        with advise_resuming():
            rows = predict_folder(run, features, out, ray=ray, workers=workers, **joined)
        print_line(console, f"{rows} predictions in {out}")  # an earlier call may have written them
    else:
        if workers is not None:
            raise ValueError(
                f"workers: got {workers} for one file; leave it out, or name a folder of files and add --ray"
            )
        from rbm.serving.prediction import predict_file

        out = Path("predictions.csv") if out is None else out
        rows = predict_file(run, features, out, **joined)
        print_line(console, f"{rows} predictions written to {out}")


def export(
    run: Run,
    format_: Annotated[
        str, typer.Option("--format", help="torch-export, aoti (compiled for this machine's processor) or onnx.")
    ] = "torch-export",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write (default: student.pt2, student-aoti.pt2 or student.onnx in RUN, with --method and"
            " --quantize in its name)."
        ),
    ] = None,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Export a student to one file that runs without this package, for any batch size."""
    from rbm.serving.export import export_student

    with status.status(Text(f"{format_}: exporting and comparing with the student")):
        path = export_student(run, format_, out, method=method, quantize=quantize)
    print_line(console, f"{path}: {path.stat().st_size:,} bytes, answers as the student of {run} does")


def latency(
    run: Run,
    root: Annotated[str | None, typer.Option(help="Folder with the dataset's raw files (default: the run's).")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of nodes per call.")] = "1,64,4096",
    repeats: Annotated[int, typer.Option(help="Calls per measurement; fewer if they take over ten seconds.")] = 200,
    device: Device = None,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Time a run's student, an MLP and the teacher on the graph of the run.

    The results go to latency.json and latency.png in the run folder.
    """
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
    print_table(console, latency_table(found))
    print_line(console, f"{data}, {picture}")


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Threads per forward pass; more than one helps with large requests.")
    ] = 1,
    max_body: Annotated[float, typer.Option(help="Largest request body, in MiB.")] = 8.0,
    max_rows: Annotated[int, typer.Option(help="Maximum rows per request and per forward pass.")] = 4096,
    max_queue: Annotated[int, typer.Option(help="Maximum rows waiting for a forward pass; beyond it, 503.")] = 16384,
    max_connections: Annotated[int, typer.Option(help="Maximum open connections; beyond it, 503.")] = 512,
    timeout: Annotated[
        float, typer.Option(help="Seconds for a client to send the headers, to send the body, or to read the response.")
    ] = 10.0,
    grace: Annotated[float, typer.Option(help="Seconds to finish open requests after SIGTERM.")] = 10.0,
    method: MethodName = None,
    quantize: Quantize = None,
) -> None:
    """Serve a student over HTTP. SIGHUP reloads the run folder; SIGTERM finishes open requests and stops."""
    from rbm.serving import server

    # Converted to whole bytes below, which is not possible for infinity and NaN.
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
        tell=lambda line: print_line(console, line),
    )
