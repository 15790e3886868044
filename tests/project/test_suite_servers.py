"""Processes that serve several tests."""

from suite.servers import Server, seconds_of_servers


def test_requests_share_a_process_and_not_its_state(tmp_path):
    script, test = tmp_path / "script.py", tmp_path / "test_one.py"
    script.write_text(
        "import os, sys, jax, jaxtyping\n"  # pytest has a plugin of the last one, which a script imports before it
        "print(os.getpid(), os.environ.get('LEFT'), jax.config.jax_enable_x64, len(sys.argv))\n"
        "os.environ['LEFT'] = 'behind'\n"
        "jax.config.update('jax_enable_x64', True)\n"
        "sys.exit(3)\n"
    )
    test.write_text("def test_fails():\n    assert 1 == 2\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    server = Server({"JAX_PLATFORMS": "cpu"})
    try:
        ran, again = (server.run(["script", str(script)]) for _ in range(2))
        failed = server.run(["pytest", str(test), "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)])
    finally:
        server.stop()
    assert ran == again
    assert (ran.returncode, ran.stdout.split()[1:]) == (3, ["None", "False", "1"])
    assert failed.returncode == 1
    assert "assert 1 == 2" in failed.stdout
    assert server.seconds > 0
    assert not server.is_running
    assert seconds_of_servers() >= 0
