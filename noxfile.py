"""Every check of the project, one session each; ``python3 -m nox -l`` lists them.

Sessions install from the tree, with uv where it is found and with pip elsewhere.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
DEVICE_BACKENDS = ("triton", "pallas", "cuda")
PARTS = ("core", "xla", *DEVICE_BACKENDS)
EXTRAS = ("gpu", "rocm", "tpu", "all")
UPSTREAM = "0.0.80.3"
TOOLCHAINS = ("triton", "jax_triton", "torch", "jax.experimental.pallas", "jax_cuda13_plugin", "libtpu")

DEVICES = "--xla_force_host_platform_device_count=8"

# The tests are thousands of small programs, which take longer to compile than to run. So they are not optimised (only
# on the CPU: XLA's code for GPUs is wrong at that level), and their fusions go through the older of XLA's two code
# generators for the CPU, which takes half the time; an XLA that no longer has it ignores the option. A program is not
# split into parts for threads to compile: they are so small that the parts take longer. The C library keeps the memory
# that it has, instead of asking for it again at the next program. The sessions `docs`, which runs the examples of the
# documentation, and `minimal` compile as users do. Dozens of tests start Python anew: bytecode is kept even where the
# environment says otherwise, and `python -c "import jax"` takes 0.7 s of a processor instead of 2.4 s.
IN_ONE_PIECE = f"{DEVICES} --xla_cpu_parallel_codegen_split_count=1"
SMALL_PROCESSES = {
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
    "MALLOC_TOP_PAD_": str(2**24),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}
QUICK = {
    "XLA_FLAGS": f"{IN_ONE_PIECE} --xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    **SMALL_PROCESSES,
}
AS_USERS = {"XLA_FLAGS": IN_ONE_PIECE, **SMALL_PROCESSES}
"""The same programs as users compile, for the examples of the documentation in the session `docs`."""

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)


EVERY_CHIP = {"EJKERNEL_EVERY_CHIP": "1"}
"""Compiles every case for every chip; else cases and chips are paired so that each appears (`suite/chips.py`)."""


def part(name: str) -> str:
    """The folder of a distribution, in the form that pip and uv take for a path."""
    return f"./packages/ejkernel-{name}"


def group(*names: str) -> list[str]:
    """The requirements of dependency groups."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def install(session: nox.Session, *requirements: str, extras: str = "") -> None:
    """Install ejkernel (core and XLA) from the tree, editable, next to `requirements`."""
    session.install("-e", f"{part('core')}{extras}", "-e", part("xla"), "-e", ".", *requirements)


def cuda_compiler() -> list[str]:
    """The compiler of the CUDA sources, as the builds of ejkernel-cuda take it; nothing where there is none."""
    if sys.platform != "linux":
        return []
    builds = nox.project.load_toml("packages/ejkernel-cuda/pyproject.toml")["tool"]["scikit-build"]["overrides"]
    return ["cmake>=3.24", "ninja", *(x for build in builds for x in build["build"]["requires"] if "nvidia" in x)]


def install_all(session: nox.Session, *groups: str) -> None:
    """Install every backend; those for devices come without their toolchains, which run nowhere but on the device."""
    install(session, *group(*groups))
    for name in DEVICE_BACKENDS:
        session.install("--no-deps", "-e", part(name))


def interpreter(version: str) -> str | None:
    """The command that runs this version of Python here: a shim on the path may exist and still run nothing."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    command = shutil.which(f"python{version}")
    if command and subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode == 0:
        return command
    return None


# --- using it --------------------------------------------------------------------------------------------------------


@nox.session
def demo(session: nox.Session) -> None:
    """Run flash attention, forward and gradient, on this machine."""
    install(session)
    session.run("ejkernel", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, quickly unless told otherwise after `--`."""
    install_all(session, "bench")
    for script in sorted((ROOT / "benchmarks").glob("*/[!_]*.py")):
        if script.parent.name == "shared":
            continue
        # Scripts without a quick form have few shapes.
        quick = ["--quick"] if '"--quick"' in script.read_text(encoding="utf-8") else []
        session.run("python", str(script), *(session.posargs or quick))


# --- tests -----------------------------------------------------------------------------------------------------------


PROCESSES = ("-n", "auto", "--maxprocesses", "4")
REPORTS = ("--plan", "--durations-by-kind", "--record-costs", "--shuffle")
"""What may follow `--` without selecting tests."""


def pytest(session: nox.Session, *args: str, **env: str) -> None:
    """Run pytest on the CPU, on at most four processes, none of which starts a pool of its own for NumPy."""
    # The plan is printed by the process that collects.
    parallel = () if "--plan" in session.posargs else (*PROCESSES, "--dist", "worksteal")
    session.run("python", "-m", "pytest", *parallel, *args, *session.posargs, env={**QUICK, **env})


def examples(session: nox.Session, compiler: dict[str, str] = QUICK) -> None:
    """Execute the fenced Python of the documentation, a page in one process: its examples share their names."""
    session.run("python", "-m", "pytest", *PROCESSES, "--dist", "loadfile", "docs", "README.md", env=compiler)


def selects(session: nox.Session) -> bool:
    """Whether something after `--` selects tests."""
    given = (argument for argument in session.posargs if not argument.isdigit())
    return not set(given) <= set(REPORTS)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests to trust a change by, in ten minutes: a covering design of all; or those selected after `--`."""
    install_all(session, "test")
    pytest(session, f"--ejk-cover={'all' if selects(session) else 'first'}")


@nox.session
def thorough(session: nox.Session) -> None:
    """Run a stronger design's tests that `tests` leaves out, the documentation's examples, other backends, compilers of
    TPUs and GPUs.
    """
    install_all(session, "test")
    session.install(*cuda_compiler())
    if selects(session):
        pytest(session)
        return
    pytest(session, "--ejk-cover=second")
    if "--plan" in session.posargs:
        return
    examples(session)
    # In the same environment: a new one takes half a minute.
    check_third_parties(session)
    compile_for_tpus(session, "--ejk-cover=second")
    lower_for_gpus(session)


@nox.session
def everything(session: nox.Session) -> None:
    """Run every test with all its parameters, and what else `thorough` runs, with every case for every chip."""
    install_all(session, "test")
    session.install(*cuda_compiler())
    pytest(session, **EVERY_CHIP)
    if "--plan" in session.posargs or selects(session):
        return
    examples(session)
    check_third_parties(session)
    compile_for_tpus(session, **EVERY_CHIP)
    lower_for_gpus(session, EVERY_CHIP)


def suite(session: nox.Session) -> None:
    """Run all tests, and without a selection of them the documentation's examples too."""
    install_all(session, "test")
    session.install(*cuda_compiler())
    pytest(session)
    if not session.posargs:
        examples(session)


def absent(session: nox.Session) -> None:
    """Stand in for a suite whose interpreter this machine does not have."""
    session.skip(f"no {session.name.replace('tests-', 'Python ')} here")


for _version in PYTHONS:
    _python = interpreter(_version)
    nox.session(name=f"tests-{_version}", python=_python or False)(suite if _python else absent)


@nox.session
def random(session: nox.Session) -> None:
    """Compare thousands of random calls with loops on the CPU; with arguments, such as `--calls 2000`, on a GPU.

    On the CPU, 150 programs of each kind are called six times. On a GPU, those of all operations are compared with
    references in float64.
    """
    if not session.posargs:
        install_all(session, "test")
        pytest(session, "tests/core/modules/operations/test_random_calls.py", EJKERNEL_RANDOM_SETTINGS="150")
        return
    install_for_gpu(session)
    command = ("python", "-m", "ejkernel_conformance.random_calls", "run", "--out", ".confirm")
    session.run(*command, "--loops", "tests/loops/device_loops.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant faults one at a time, and tell which command catches each; `-- --piece 3/8 --fast`; takes hours."""
    install_all(session, "test")
    session.run("python", "tests/support/suite/mutants.py", *session.posargs, env=QUICK, success_codes=[0, 1])


@nox.session
def confirm(session: nox.Session) -> None:
    """Run every conformance test, layers of models in bfloat16 and the shapes of FLA's tests on this machine's GPU, and
    write evidence; continues an earlier run.
    """
    install_for_gpu(session)
    command = ("python", "-m", "ejkernel_conformance.confirm")
    minutes = ("--minutes", "100000")
    session.run(*command, "run", "--out", ".confirm", *minutes, *session.posargs, success_codes=[0, 1, 2])
    session.run(*command, "merge", ".confirm/state.jsonl")
    session.run("pytest", "-n0", "tests/models/test_bfloat16.py", "tests/models/test_shapes_of_fla.py")


def install_for_gpu(session: nox.Session) -> None:
    """Install all backends with what they need on a GPU; the compiled CUDA kernels lie where their sources are."""
    install_all(session, "test")
    session.install("jax[cuda13]", "jax-triton")
    folder = Path(session.create_tmp()) / "compiled"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("--no-deps", "--target", str(folder), part("cuda"))
    for library in (folder / "ejkernel_cuda").glob("compiled_kernels*"):
        shutil.copy(library, ROOT / "packages/ejkernel-cuda/src/ejkernel_cuda")


def check_third_parties(session: nox.Session) -> None:
    """Install two backends from outside: the suite must pass the honest one and catch the one that lies."""
    session.install("./tests/third_party_plugin", "./tests/third_party_liar")
    pytest(session, "tests/third_party")


def compile_for_tpus(session: nox.Session, *args: str, **env: str) -> None:
    """Compile the TPU kernels for four chips with the compiler that libtpu holds, which runs on any Linux machine."""
    if sys.platform != "linux":
        session.log("libtpu is for Linux alone")
        return
    session.install("-e", f"{part('pallas')}[aot]")
    session.run("python", "-c", "import libtpu")  # without it the tests are not collected
    folders = ("tests/pallas/tpu", "tests/pallas/tpu/profile")
    pytest(session, "--needs=libtpu", *args, *folders, ALLOW_MULTIPLE_LIBTPU_LOAD="1", **env)


def lower_for_gpus(session: nox.Session, chips: dict[str, str] | None = None) -> None:
    """Lower programs with Triton kernels for CUDA, through jax-triton and JAX's own compiler; needs no GPU."""
    if sys.platform != "linux":
        session.log("Triton is for Linux alone")
        return
    session.install("-e", part("triton"))
    version = session.run("python", "-c", "import jaxlib; print(jaxlib.__version__)", silent=True)
    session.install("--no-deps", f"jax-cuda13-plugin=={str(version).strip()}")
    session.run("python", "-c", "import jax_triton, jax_cuda13_plugin")  # without them the tests are not collected
    files = map(str, sorted(Path("tests/triton").rglob("test_*lowering.py")))
    # What follows `--` is for pytest in `thorough`, and requirements in `triton_lowering`.
    session.run("python", "-m", "pytest", *PROCESSES, "--dist", "worksteal", *files, env=QUICK | (chips or {}))


@nox.session
def third_party(session: nox.Session) -> None:
    """Run what `thorough` does with backends from outside, alone."""
    install(session, *group("test"))
    check_third_parties(session)


@nox.session
def ahead(session: nox.Session) -> None:
    """Run what `thorough` compiles for TPUs, alone, each case for each chip."""
    install(session, *group("test"))
    compile_for_tpus(session, **EVERY_CHIP)


@nox.session
def triton_lowering(session: nox.Session) -> None:
    """Run what `thorough` lowers for GPUs, alone, each case for each chip; installs requirements after `--`."""
    install(session, *group("test"), *session.posargs)
    lower_for_gpus(session, EVERY_CHIP)


def floors(*names: str) -> Iterator[str]:
    """The lowest version of everything that the named parts import directly, as pins."""
    for name in names:
        for line in nox.project.load_toml(f"{part(name)}/pyproject.toml")["project"]["dependencies"]:
            requirement = Requirement(line)
            if not requirement.name.startswith("ejkernel"):
                yield from (f"{requirement.name}=={s.version}" for s in requirement.specifier if s.operator == ">=")


@nox.session(python=interpreter(PYTHONS[0]) or False)
def minimal(session: nox.Session) -> None:
    """Run the demo and the conformance suite on the oldest Python, with the lowest versions the metadata allows."""
    if not interpreter(PYTHONS[0]):
        session.skip(f"no Python {PYTHONS[0]} here")
    install(session, *group("test"), *dict.fromkeys(floors("core", "xla")))
    session.run("ejkernel", "demo")
    pytest(session, "--pyargs", "ejkernel_conformance", XLA_FLAGS=DEVICES)


@nox.session
def models(session: nox.Session) -> None:
    """Write the fixtures of `tests/models` with PyTorch and transformers; with `-- --check` compare them alone."""
    session.install("numpy", "torch", "transformers")
    session.run("python", "-m", "tests.models.make_fixtures", *session.posargs)


# --- reading it ------------------------------------------------------------------------------------------------------


@nox.session
def upstream(session: nox.Session) -> None:
    """Compare the list of the earlier library's public names with that library; `-- --write` writes the list anew."""
    install(session, "beartype", "chex", "einops", "pydantic")
    folder = Path(session.create_tmp())
    session.install("--no-deps", "--target", str(folder / "upstream"), f"ejkernel=={UPSTREAM}")
    sources = ROOT / part("core") / "src" / "ejkernel" / "compat"
    listed, found = sources / "upstream_surface.json", folder / "surface.json"
    # PYTHONPATH comes before the installed packages, so that its `ejkernel` is the earlier one.
    earlier = {"PYTHONPATH": str(folder / "upstream"), "HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    session.run("python", str(sources / "surface.py"), str(found), env=earlier)
    if "--write" in session.posargs:
        shutil.copyfile(found, listed)
    elif found.read_text(encoding="utf-8") != listed.read_text(encoding="utf-8"):
        session.error(f"{listed.relative_to(ROOT)} is not what ejkernel {UPSTREAM} has: nox -s upstream -- --write")
    session.run("python", "-m", "ejkernel.compat.upstream", "--strict")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling, import rules, change fragments and metadata."""
    session.install(*group("lint"))
    sources = os.pathsep.join(str(ROOT / part(name) / "src") for name in PARTS)
    manifests = ["pyproject.toml", *(f"{part(name)}/pyproject.toml" for name in PARTS)]
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("python", "tests/project/check_words.py")
    session.run("lint-imports", env={"PYTHONPATH": sources})
    session.run("towncrier", "build", "--draft", "--version", PROJECT["project"]["version"], silent=True)
    session.run("validate-pyproject", *manifests)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with pyright, strictly."""
    install_all(session, "types")
    session.run("pyright", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, any warning being an error, and execute the examples in it."""
    install_all(session, "docs", "test")  # the support matrix shows the backends that are there
    session.run("python", ".ci/build_site.py")
    # MkDocs builds the same pages, so that the site depends on neither of the two alone.
    session.run("mkdocs", "build", "--strict", env={"EJKERNEL_DOCS_MODELS": "skip"})
    examples(session, AS_USERS)


# --- shipping it -----------------------------------------------------------------------------------------------------


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the six distributions, and prove in clean environments that they install and run."""
    session.install(*group("release"))
    shutil.rmtree(DIST, ignore_errors=True)
    for project in (".", *map(part, PARTS)):
        session.run("python", "-m", "build", "--outdir", str(DIST), project)
    tag_compiled_wheels(session)
    check_wheels(session)
    check_plain_install(session)
    check_backends_alone(session)


def tag_compiled_wheels(session: nox.Session) -> None:
    """Name compiled wheels manylinux_2_28; fails where one asks for a newer C or C++ library than that promises."""
    for wheel in sorted(DIST.glob("*-linux_*.whl")):
        tag = f"manylinux_2_28_{wheel.stem.rpartition('-linux_')[2]}"
        session.run("auditwheel", "repair", "--plat", tag, "--wheel-dir", str(DIST), str(wheel))
        wheel.unlink()
    session.install(*group("test"))
    session.run("python", "-m", "pytest", "tests/cuda/test_wheel.py", env={"EJKERNEL_CUDA_WHEELS": str(DIST)})


def check_wheels(session: nox.Session) -> None:
    """Check the metadata, that versions move together, and that each wheel holds its licence and its type marker."""
    built = sorted(DIST.glob("*.whl"))
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    versions = {wheel.name.split("-")[1] for wheel in built}
    if len(built) != len(PARTS) + 1 or len(versions) != 1:
        session.error(f"expected {len(PARTS) + 1} wheels of one version, got {[wheel.name for wheel in built]}")
    for wheel in built:
        names = [Path(name).name for name in zipfile.ZipFile(wheel).namelist()]
        wanted = {"LICENSE"} if wheel.name.startswith("ejkernel-") else {"LICENSE", "py.typed"}
        if missing := wanted.difference(names):
            session.error(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        check_evidence(session, wheel)


def check_evidence(session: nox.Session, wheel: Path) -> None:
    """Check that a wheel holds all evidence files of its package: without them, dispatch falls back to XLA."""
    package = wheel.name.split("-")[0]
    source = ROOT / part(package.removeprefix("ejkernel_")) / "src"
    there = {path.relative_to(source).as_posix() for path in source.glob(f"{package}/evidence/*/*.json")}
    if missing := there.difference(zipfile.ZipFile(wheel).namelist()):
        session.error(f"{wheel.name} lacks {', '.join(sorted(missing))}")


def clean_environment(session: nox.Session, name: str) -> Path:
    """Make an empty environment with pip in it, and return the folder of its commands."""
    folder = Path(session.create_tmp()) / name
    session.run("python", "-m", "virtualenv", "--quiet", "--clear", str(folder))
    return folder / ("Scripts" if os.name == "nt" else "bin")


def pip_install(session: nox.Session, commands: Path, *args: str) -> None:
    """Install with the pip of that environment, taking ejkernel's own wheels from `dist`."""
    session.run(str(commands / "pip"), "install", "--quiet", "--find-links", str(DIST), *args, external=True)


def check_plain_install(session: nox.Session) -> None:
    """The distribution `ejkernel` runs, and every extra resolves against the wheels just built."""
    commands = clean_environment(session, "plain")
    pip_install(session, commands, "ejkernel")
    session.run(str(commands / "ejkernel"), "demo", external=True)
    for extra in EXTRAS:
        pip_install(session, commands, "--dry-run", f"ejkernel[{extra}]")


@nox.session
def resolve(session: nox.Session) -> None:
    """Resolve every extra against the built wheels, with pip and uv, for every Python and JAX; takes minutes."""
    session.install("uv>=0.5", *group("test"))
    folder = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    for project in (".", *map(part, PARTS)):
        # Metadata is all that is looked at: nothing is compiled.
        build = ("uv", "build", "--wheel", "--quiet", "--out-dir", str(folder), project)
        session.run(*build, env={"SKBUILD_WHEEL_CMAKE": "false"})
    session.run("python", "-m", "pytest", "tests/project/test_installing.py", env={"EJKERNEL_WHEELS": str(folder)})


def check_backends_alone(session: nox.Session) -> None:
    """Each backend, with core and nothing of its toolchain, imports and is discovered."""
    commands = clean_environment(session, "core")
    pip_install(session, commands, "ejkernel-core")
    for name in PARTS[1:]:
        folder = Path(session.create_tmp()) / f"only-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        pip_install(session, commands, "--no-deps", "--target", str(folder), f"ejkernel-{name}")
        alone = {"PYTHONPATH": str(folder)}
        script = f"import sys, ejkernel_{name}; sys.exit(' '.join(sys.modules.keys() & set({TOOLCHAINS!r})) or 0)"
        session.run(str(commands / "python"), "-c", script, env=alone, external=True)
        session.run(str(commands / "ejkernel"), "doctor", env=alone, external=True)
