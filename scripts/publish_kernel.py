# SPDX-License-Identifier: Apache-2.0
"""Build the kernel and upload it to a Kernel Hub repository of yours: builds to the branch of its version, the card to main.

    python scripts/publish_kernel.py OWNER/mala-flash-attn             # builds, and lists what it would upload
    python scripts/publish_kernel.py OWNER/mala-flash-attn --upload    # needs a token: HF_TOKEN, or hf auth login

Keep "flash-attn" in the name, no digit behind "flash": docs/kernel_hub.md says why.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from build_kernel import CARD, KERNEL, build, read_settings
from huggingface_hub import HfApi, get_token


def check_name(repo_id: str) -> None:
    """ValueError for a name under which Transformers would run the kernel wrongly, or not at all."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]*flash-attn[\w.-]*", repo_id, re.ASCII) or re.search(r"flash.*\d", repo_id):
        raise ValueError(
            f'the repository must be named OWNER/NAME, NAME with "flash-attn" in it and no digit behind "flash", got {repo_id!r}: '
            "Transformers decides by the name how it calls a kernel (docs/kernel_hub.md)"
        )


def stage(folder: Path, repo_id: str) -> dict[str, Path]:
    """Lay out in ``folder`` what each branch of ``repo_id`` gets. Returns {branch: its folder}."""
    settings = read_settings()["general"]
    main, version = folder / "main", folder / f"v{settings['version']}"
    main.mkdir()
    build(version / "build")
    card = (version / "build" / CARD).read_text("utf-8").replace(settings["hub"]["repo-id"], repo_id)
    (version / "build" / CARD).unlink()
    (main / "README.md").write_text(card, "utf-8")
    shutil.copytree(KERNEL / "benchmarks", version / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    return {path.name: path for path in (main, version)}


def publish(api: Any, repo_id: str, branches: dict[str, Path]) -> None:
    """Upload each staged branch; of the version's branch, what is no longer built goes.

    Raises:
        PermissionError: if the owner of ``repo_id`` is neither the token's user nor one of its organizations.
    """
    user = api.whoami()
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    if repo_id.split("/")[0] not in owners:
        raise PermissionError(f"your token may write to {', '.join(owners)}, not to {repo_id}")
    where: dict[str, Any] = {"repo_id": repo_id, "repo_type": "kernel"}
    api.create_repo(**where, exist_ok=True)
    for branch, folder in branches.items():
        if branch != "main":
            api.create_branch(**where, branch=branch, exist_ok=True)
        stale = None if branch == "main" else ["build/**", "benchmarks/**"]
        api.upload_folder(
            **where, folder_path=folder, revision=branch, delete_patterns=stale, commit_message="Upload the kernel"
        )


def main() -> None:
    """List or upload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="the repository; made if there is none")
    parser.add_argument("--upload", action="store_true", help="upload; without it nothing leaves this machine")
    options = parser.parse_args()
    try:
        check_name(options.repo_id)
    except ValueError as error:
        parser.error(str(error))
    if options.upload and get_token() is None:
        parser.error("uploading needs a token with write access: set HF_TOKEN, or run hf auth login")
    with tempfile.TemporaryDirectory() as folder:
        branches = stage(Path(folder), options.repo_id)
        for branch, path in branches.items():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                print(f"{branch:<6} {file.stat().st_size:>8}  {file.relative_to(path).as_posix()}")
        if options.upload:
            publish(HfApi(), options.repo_id, branches)
            print(f"uploaded to https://hf.co/kernels/{options.repo_id}")
        else:
            print(f"nothing was uploaded to {options.repo_id}: add --upload")


if __name__ == "__main__":
    main()
