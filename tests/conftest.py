"""Two forced host devices and no fused multiply-add for every test, and random programs that are the same in every run.

Both flags count before JAX starts alone. The second is what `experiments.devices.all_devices` sets for a run.
"""

import os
import platform

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    f"{' --xla_cpu_max_isa=AVX' if platform.machine() in ('x86_64', 'AMD64') else ''}"
).strip()

import hypothesis

PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)
hypothesis.settings.register_profile(
    "jaxremat", derandomize=True, deadline=None, database=None, phases=PHASES, print_blob=False
)
hypothesis.settings.load_profile("jaxremat")
