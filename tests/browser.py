"""Finds the Chromium that the browser tests run on; run as a script, it gets one if need be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--disable-background-networking", "--disable-component-update", "--disable-quic"]


def find() -> str | None:
    """Return the path of an installed Chromium or Chrome, Playwright's own included."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def get() -> str:
    """Return the path of a Chromium, installing one where there is none."""
    attempts = [[sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"]]
    if Path("/etc/debian_version").exists() and os.geteuid() == 0:
        attempts += [["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", "chromium"]]
    for command in [None, *attempts]:
        if command:
            print("no Chromium found, trying:", *command[-5:], flush=True)
            subprocess.run(command, check=False)
        if found := find():
            return found
    raise SystemExit("no Chromium or Chrome could be found or installed: browser tests cannot run")


if __name__ == "__main__":
    print("browser tests use", get())
