"""Other names of the paper's datasets, for which the package has hyperparameters."""

# Other name, in the form of :func:`plain`, -> name.
ALIASES = {
    "computers": "amazon-computers",
    "computer": "amazon-computers",
    "amazon-computer": "amazon-computers",
    "photo": "amazon-photo",
    "photos": "amazon-photo",
    "cs": "academic-cs",
    "coauthor-cs": "academic-cs",
    "physics": "academic-physics",
    "coauthor-physics": "academic-physics",
    "arxiv": "ogbn-arxiv",
    "products": "ogbn-products",
}


def plain(name: str) -> str:
    """A name in lower case, with ``-`` between its words: ``Amazon_Photo`` becomes ``amazon-photo``."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def full_name(name: str) -> str:
    """The name that a plain name or another name of a dataset stands for: ``Photo`` becomes ``amazon-photo``."""
    return ALIASES.get(plain(name), plain(name))
