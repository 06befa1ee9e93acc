"""A small transformer whose feed-forward networks are mixtures of experts: trained, observed, compiled and served.

    pip install -e '.[export]' && python examples/digits_transformer.py [FOLDER]

Each handwritten digit of scikit-learn is cut into 16 patches, which are the tokens. In both blocks, ``RbMFeedForward``
replaces the two linear layers of a transformer: each token is routed to 2 of 8 experts. K-means initialises the memory.
"""

import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import rbm


class Block(nn.Module):
    """Attention, then experts, both with a norm before them and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.ffn = nn.LayerNorm(width), rbm.RbMFeedForward(width, width, 8, 2, activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    """Maps patches ``[B, 16, 4]`` to logits ``[B, 10]``."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Linear(4, width), nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, patches: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(patches) + self.position)).mean(1))


def digits() -> list[Tensor]:
    """Return the patches of training and test images, then the labels of both."""
    data = load_digits()
    images = torch.from_numpy(data.images).float() / 8 - 1
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)  # [N, 16, 4]
    return train_test_split(patches, torch.from_numpy(data.target), test_size=0.25, random_state=0)


def train(model: nn.Module, patches: Tensor, labels: Tensor, epochs: int) -> None:
    rbm.initialize_memory(model, patches, max_rows=300)
    optimizer = torch.optim.AdamW(rbm.parameter_groups(model, weight_decay=0.01), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(patches)).split(128):
            optimizer.zero_grad()
            with rbm.record_routing(model):
                loss = F.cross_entropy(model(patches[rows]), labels[rows]) + rbm.auxiliary_loss(model)
            loss.backward()
            optimizer.step()
    model.eval()


def serve(path: Path) -> ThreadingHTTPServer:
    """Start an HTTP server on a free port that answers posted patches with logits, from the ONNX file alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            patches = np.asarray(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dtype=np.float32)
            (logits,) = session.run(["output"], {"patches": patches})
            self.send_response_only(200)
            self.end_headers()
            self.wfile.write(json.dumps(logits.tolist()).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@torch.no_grad()
def main(folder: Path, epochs: int, seed: int, backend: str = "inductor") -> dict[str, float]:
    """Train, observe, compile, export, serve; print and return the test accuracy of every stage."""
    train_x, test_x, train_y, test_y = digits()
    torch.manual_seed(seed)
    model = Transformer()
    with torch.enable_grad():
        train(model, train_x, train_y, epochs)

    def accuracy(logits: Tensor) -> float:
        return (logits.argmax(-1) == test_y).float().mean().item()

    rbm.track_usage(model)
    found = {"trained": accuracy(model(test_x))}
    print(rbm.expert_usage(model))
    found["compiled"] = accuracy(torch.compile(model, backend=backend, fullgraph=True)(test_x))
    folder.mkdir(parents=True, exist_ok=True)
    server = serve(rbm.export(model, test_x[:4], "onnx", folder / "digits.onnx"))
    posted = urllib.request.Request(f"http://127.0.0.1:{server.server_port}", json.dumps(test_x.tolist()).encode())
    found["served"] = accuracy(torch.tensor(json.load(urllib.request.urlopen(posted))))
    print("\n".join(f"{name:>8}: {value:.2%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["runs/digits_transformer"]), epochs=30, seed=0)
