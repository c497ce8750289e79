"""Two forced host devices for every test (set before JAX starts), and random programs that are the same in every run."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

import hypothesis

hypothesis.settings.register_profile("jaxremat", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxremat")
