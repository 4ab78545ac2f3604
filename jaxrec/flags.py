"""Every absl flag of the commands, and how flags become a config. Libraries never read FLAGS."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import flags

from jaxrec.checks import UserError, one_of, require

FLAGS = flags.FLAGS


def cache_dir(*parts: str) -> str:
    """Returns a folder in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jaxrec", *parts)


def define_common() -> None:
    """Flags that every command has."""
    flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, TensorBoard events, checkpoints, traces.")
    flags.DEFINE_string("data_dir", cache_dir("data"), "Where prepared data sets are, and are prepared where absent.")
    flags.DEFINE_string("mesh", None, "Device mesh, such as data:2,model:4 (an axis left out is 1).")
    flags.DEFINE_string(
        "embedding_sharding",
        None,
        "How tables are spread: replicated, row, row_cyclic, table, column, auto.",
    )
    flags.DEFINE_string(
        "embedding_kernel",
        None,
        "What looks up and updates embedding rows: compiled (for CPUs), xla, or auto, the first where it is to be had.",
    )
    flags.DEFINE_string(
        "distributed",
        None,
        "Several processes: auto finds them (SLURM, Open MPI, Kubernetes, Cloud TPU, JAX_COORDINATOR_ADDRESS, ...), "
        "and is the default where --coordinator or that variable is given; else off.",
    )
    flags.DEFINE_string("coordinator", None, "host:port of process 0, or JAX_COORDINATOR_ADDRESS.")
    flags.DEFINE_integer("num_processes", None, "How many processes there are, or JAX_NUM_PROCESSES.")
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0, or JAX_PROCESS_ID.")
    flags.DEFINE_integer("simulate_cpu_devices", 0, "Simulate this many CPU devices; correctness only, not speed.")
    flags.DEFINE_string("compile_cache", cache_dir("compile"), "Persistent compile cache; 'off' for none.")


def define_train() -> None:
    """Flags of `jaxrec.train`."""
    define_common()
    flags.DEFINE_string("config", None, "Named config; 'help' lists them.")
    flags.DEFINE_multi_string("set", [], "path=value: sets any field of the config; may be repeated.")
    flags.DEFINE_string("precision", None, "Compute type of the dense part: float32, bfloat16 or float16.")
    flags.DEFINE_string(
        "table_dtype", None, "Type of embedding tables: float32, or bfloat16 or float16 with stochastic rounding."
    )
    flags.DEFINE_string(
        "cpu_products", None, "Library of matrix products on CPUs: default (XLA's choice), or eigen; measure both."
    )
    flags.DEFINE_string("matmul", None, "float32 matrix products on a GPU: float32, or tf32, which is faster.")
    flags.DEFINE_string("dense_sharding", None, "How dense parameters are spread: replicated, or fsdp (over model).")
    flags.DEFINE_float("capacity_margin", None, "Room of an exchange over the rows measured; 0: for the worst case.")
    flags.DEFINE_integer("steps", None, "Updates in all.")
    flags.DEFINE_integer("batch_size", None, "Rows of a global batch.")
    flags.DEFINE_integer("seed", None, "Seed of initial weights, batch order and dropout.")
    flags.DEFINE_integer("log_every", None, "Steps between metric lines.")
    flags.DEFINE_integer("eval_every", None, "Steps between evaluations; 0: at the end only.")
    flags.DEFINE_integer("checkpoint_every", None, "Steps between checkpoints; 0: best and last only.")
    flags.DEFINE_integer("keep_last", None, "Checkpoints kept besides the best.")
    flags.DEFINE_integer("patience", None, "Evaluations without a better NE before stopping; 0: never.")
    flags.DEFINE_string("plan", None, "explain: print placement, memory and exchanged bytes of the tables, and end.")
    flags.DEFINE_string("profile_steps", "", "Steps to trace, a:b, half-open.")
    flags.DEFINE_string("resume", "auto", "auto continues a matching run or starts one; must; never.")


def define_evaluate() -> None:
    """Flags of `jaxrec.evaluate`."""
    define_common()
    flags.DEFINE_string("split", "test", "Split to evaluate.")
    flags.DEFINE_integer("step", None, "Checkpoint to evaluate; the best where it is not given.")


def define_profile() -> None:
    """Flags of `jaxrec.profile`."""
    flags.DEFINE_string(
        "stages",
        "input",
        "What is timed: input (read, decode, shuffle, batch, transfer, together), step (its regions, a verdict; needs "
        "--workdir), all.",
    )
    flags.DEFINE_integer("threads", 2, "Of the pipeline, where its stages run together.")
    flags.DEFINE_integer("samples", 5, "Of each stage.")
    flags.DEFINE_float("seconds", 1.0, "Of a sample, at least.")
    flags.DEFINE_integer("traced_steps", 5, "Steps that are traced for the regions.")
    define_train()


def define_prepare() -> None:
    """Flags of `jaxrec.prepare`."""
    flags.DEFINE_string(
        "dataset", None, "What the input is: movielens, criteo, tabular; or synthetic, which needs none."
    )
    flags.DEFINE_string("input", None, "File, archive or folder to prepare.")
    flags.DEFINE_string("data_dir", cache_dir("data"), "Where the prepared data set goes.")
    flags.DEFINE_string("schema", None, "TOML file that says what the columns are for; with --propose, to be written.")
    flags.DEFINE_bool("propose", False, "Look at the table and write a schema for it, instead of preparing it.")
    flags.DEFINE_string("name", None, "Of the prepared data set; else the schema's, else the input's.")
    flags.DEFINE_string("vocabulary", None, "frequency or hash, of every table; else the schema's.")
    flags.DEFINE_integer("min_count", None, "Occurrences that a value needs for a row of its own; else the schema's.")
    flags.DEFINE_integer("max_table_rows", None, "Rows of an embedding table at most; else the schema's.")
    flags.DEFINE_integer("max_bad_rows", 0, "Malformed rows that are left out; one more ends the command.")
    flags.DEFINE_string(
        "compression", "zstd", "Of the prepared files: zstd; or none, about three times as large and faster."
    )
    flags.DEFINE_integer("threads", None, "That read and encode; else one for each core.")
    flags.DEFINE_multi_string("set", [], "field=value of the synthetic data, such as train_rows=1000000.")


def prepare_process() -> None:
    """Applies the flags that must act before JAX makes its first array."""
    require(
        FLAGS.simulate_cpu_devices >= 0,
        f"--simulate_cpu_devices is {FLAGS.simulate_cpu_devices}, but must not be negative",
    )
    if FLAGS.simulate_cpu_devices:
        _simulate(FLAGS.simulate_cpu_devices)
    require(
        not os.path.exists(FLAGS.compile_cache) or os.path.isdir(FLAGS.compile_cache),
        f"--compile_cache is {FLAGS.compile_cache!r}, which is a file, but must be a folder, or off",
    )
    from jaxrec.startup import enable_compile_cache, keep_freed_memory

    keep_freed_memory()
    enable_compile_cache("" if FLAGS.compile_cache == "off" else FLAGS.compile_cache)
    _join_processes()


def _join_processes() -> None:
    from jaxrec import processes

    named = {name: FLAGS[name].value for name in ("coordinator", "num_processes", "process_id")}
    one_of("--distributed", FLAGS.distributed or "off", ("auto", "off"))
    asked = FLAGS.distributed
    if asked is None and (named["coordinator"] or os.environ.get("JAX_COORDINATOR_ADDRESS")):
        asked = "auto"
    if asked == "auto":
        processes.start(*named.values())
        return
    for name, value in named.items():
        hint = "is off" if FLAGS.distributed else "is not given, and neither is --coordinator"
        require(value is None, f"--{name} is {value}, but --distributed {hint}; auto joins several processes")


def _simulate(count: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def resolve_config() -> Any:
    """Returns the config that the flags of `jaxrec.train` ask for: the named one, then --set, then the other flags."""
    from jaxrec import mesh
    from jaxrec.configs import catalogue, overrides

    if not FLAGS.config:
        raise UserError(f"--config is not given, but must be one of: {', '.join(catalogue.names())} (or help)")
    config = overrides.apply(catalogue.get(FLAGS.config), FLAGS.set)
    values = {
        "precision": FLAGS.precision,
        "matmul": FLAGS.matmul,
        "cpu_products": FLAGS.cpu_products,
        "mesh": None if FLAGS.mesh is None else mesh.parse(FLAGS.mesh),
        "embedding.sharding": FLAGS.embedding_sharding,
        "embedding.dtype": FLAGS.table_dtype,
        "embedding.kernel": FLAGS.embedding_kernel,
        "dense_sharding": FLAGS.dense_sharding,
        "embedding.capacity_margin": FLAGS.capacity_margin,
    }
    for name in ("steps", "batch_size", "seed", "log_every", "eval_every", "checkpoint_every", "keep_last", "patience"):
        values[f"training.{name}"] = FLAGS[name].value
    return overrides.replace_all(config, {path: value for path, value in values.items() if value is not None})


def run_command(main: Callable[[], int], define: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; ends the process with its exit status.

    A `UserError` and a wrong flag end with one sentence on stderr and status 2.
    """
    define()
    # Until a run handles it (`training.signals`) nothing is to be saved: clean up and end, with the status of a kill.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if "--help" in sys.argv[1:]:
            # Flags of jaxrec and its studies; absl's own are left out. A study's are defined in its module, which runs
            # as __main__.
            modules = sorted(m for m in FLAGS.flags_by_module_dict() if not m.startswith("absl"))
            print("\n\n".join(text for m in modules if (text := FLAGS.module_help(m).strip())))
            sys.exit(0)
        rest = FLAGS(sys.argv)
        require(len(rest) == 1, f"{rest[1] if len(rest) > 1 else ''!r} is no flag; flags look like --name=value")
        status, why = main(), ""
    except flags.Error as e:
        why = str(e).strip().replace("\n", " ")
        status = _complain(why)
    except (UserError, PermissionError) as e:
        why = str(e) if isinstance(e, UserError) else f"{e.filename} cannot be used: {e.strerror}"
        if others := _processes():
            others.claim_last_word()
        status = _complain(why)
        logging.disable(logging.CRITICAL)  # All is said; libraries that met the same fault have nothing to add.
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        why, status = "its output is closed", 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        why = "interrupted"
        print(why, file=sys.stderr)
        status = 128 + signal.SIGINT
    except SystemExit as e:  # By --help, or by a signal.
        status, why = e.code if isinstance(e.code, int) else 0, "stopped by a signal"
    except Exception as e:
        if others := _processes():
            others.fail(e)
        raise
    sys.stdout.flush()
    if others := _processes():
        others.leave(status, why)
    if status and _is_command():
        # A library's thread may never end, after a write that failed for instance.
        late = threading.Timer(10, os._exit, (status,))
        late.daemon = True
        late.start()
    sys.exit(status)


def _is_command() -> bool:
    """Whether this process is a command's own, and not a program that has called one."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith(("jaxrec.", "experiments."))


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _processes() -> Any:
    """Returns the module `processes` where it is in use; where it was never imported there are no others."""
    return sys.modules.get("jaxrec.processes")
