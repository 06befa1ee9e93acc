"""FusedRbMLayer in a model without a graph: handwritten digits in any of four orientations.

    pip install -e . && python examples/rotated_digits.py

A digit looks different in each orientation, so no single linear map classifies them all well. ``FusedRbMLayer`` routes
each image to the 2 of 24 linear maps with the most similar memory vectors. It is compared with one linear map, and with
a network whose hidden layer gives about as many active parameters. The mixture is trained, saved, loaded and exported,
and gives the same accuracy after each step.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from rbm import FusedRbMLayer


def rotated_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images ``[4 N, 8, 8]`` in [0, 1] and labels ``[4 N]`` of the training and of the test digits: 1,797 in total."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    halves = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=0)
    train, test, train_labels, test_labels = halves

    def every_way_up(images: Tensor) -> Tensor:
        return torch.cat([images.rot90(turns, dims=(1, 2)) for turns in range(4)])

    return every_way_up(train), train_labels.repeat(4), every_way_up(test), test_labels.repeat(4)


def classifier(*layers: nn.Module) -> nn.Sequential:
    """A model from images ``[B, 8, 8]`` to logits ``[B, 10]``; ``layers`` take 64 pixels."""
    # The norm subtracts each image's mean: cosines between images without negative pixels are all similar.
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64, elementwise_affine=False), *layers)


def linear() -> nn.Sequential:
    return classifier(nn.Linear(64, 10))


def hidden_layer() -> nn.Sequential:
    return classifier(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))


def mixture() -> nn.Sequential:
    return classifier(FusedRbMLayer(64, 10, num_experts=24, top_k=2))


MODELS = {"nn.Linear": linear, "a hidden layer": hidden_layer, "FusedRbMLayer": mixture}


def active_parameters(model: nn.Module) -> int:
    """Numbers that one prediction uses: for a mixture, all memory vectors and ``top_k`` of the experts."""
    count = sum(p.numel() for p in model.parameters())
    for layer in model:
        if isinstance(layer, FusedRbMLayer):
            expert = layer.weight[0].numel() + layer.bias[0].numel() + layer.attention[0].numel()
            count += layer.memory.numel() - expert * (layer.num_experts - layer.top_k)
    return count


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Train like any other model: nothing here is specific to experts or their memory."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(256):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(-1) == labels).float().mean().item()


def export(model: nn.Module, images: Tensor, path: Path) -> None:
    """Write the model as one graph for any number of images."""
    program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)


def main(folder: Path, epochs: int, seed: int) -> dict[str, float]:
    """Train, save, load, export; print and return the test accuracy of every stage."""
    images, labels, test_images, test_labels = rotated_digits()
    accuracies = {}
    for name, build in MODELS.items():
        torch.manual_seed(seed)
        model = train(build(), images, labels, epochs)
        accuracies[name] = accuracy(model, test_images, test_labels)
        print(f"{name:>15}: {accuracies[name]:.2%}, {active_parameters(model):,} active parameters")

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "digits.pt")
    loaded = mixture()
    loaded.load_state_dict(torch.load(folder / "digits.pt", weights_only=True))
    accuracies["loaded"] = accuracy(loaded.eval(), test_images, test_labels)

    export(loaded, test_images, folder / "digits.pt2")
    # Another process that loads the file needs only `import rbm_kernels`, for its operators.
    exported = torch.export.load(folder / "digits.pt2").module()
    accuracies["exported"] = accuracy(exported, test_images, test_labels)
    print(f"         loaded: {accuracies['loaded']:.2%}\n       exported: {accuracies['exported']:.2%}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/rotated_digits"), help="output folder")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.out, options.epochs, options.seed)
