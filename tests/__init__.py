"""Test suite; its folders mirror the packages."""
