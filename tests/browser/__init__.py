"""Tests of the pages in a real browser, Debian's chromium driven by selenium."""
