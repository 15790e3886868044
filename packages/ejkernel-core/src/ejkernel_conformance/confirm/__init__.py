"""The suite on a device, in several processes and as many calls as it takes, and the evidence that it leaves.

    python3 -m ejkernel_conformance.confirm run --out FOLDER [--minutes 9] [--first NAME] [--resume FILE]
    python3 -m ejkernel_conformance.confirm merge FOLDER/state.jsonl...

`run` runs every test of every implementation that is made for this device, and appends what it finds to a
state file. A run that ends early is continued by another with `--resume`. `merge` writes the evidence files.

    python3 -m ejkernel_conformance.confirm programs --out after.json
    python3 -m ejkernel_conformance.confirm carry before.json after.json

`programs` writes what calls lower to, without the device; `carry` renews the digests of evidence whose sources changed
and whose programs did not.
"""
