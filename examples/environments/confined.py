"""A process that gives up everything but computing, and then becomes Python to run what is on its standard input.

Samplers send such programs. On Linux one can read Python's library and nothing else (Landlock), and call what ALLOWED
has (seccomp): it starts no process or thread, sends nothing, signals nobody, and writes only to its standard output.
Elsewhere none is run."""

import ctypes
import os
import platform
import resource
import struct
import sys

# By machine: AUDIT_ARCH, fcntl, the calls that read, compute, wait and tell the time, and execve, which stays confined
ALLOWED = {
    "x86_64": (0xC000003E, 72, "0-6 8-15 17 19-21 24 25 28 32 33 39 59 60 63 79 89 96-100 102 104 107 108 110 131 158 "
    "186 201 202 204 217-219 228 229 231 257 262 267 269 273 292 318 332 334 439"),
    "aarch64": (0xC00000B7, 25, "17 23 24 48 56 57 61-63 65-67 78-80 93 94 96 98 99 113 114 123 124 128 132 "
    "134 135 139 153 160 165 169 172-179 214-216 221 222 226 233 278 291 293 439"),
}  # fmt: skip


def main() -> None:
    if sys.platform != "linux" or platform.machine() not in ALLOWED:
        sys.exit(f"there is no sandbox for {sys.platform} on {platform.machine()}")
    arch, fcntl, calls = ALLOWED[platform.machine()]
    # Seconds, and bytes: what it prints goes to a file, and a model has to read it.
    for limit, most in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_FSIZE, 2000)):
        resource.setrlimit(limit, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    # Root keeps one right: to read another user's Python.
    kept = 0b10 if os.geteuid() == 0 else 0
    libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0))
    # landlock_create_ruleset, landlock_add_rule and landlock_restrict_self have no names in libc.
    rules = libc.syscall(444, struct.pack("Q", 0x7FFF), ctypes.c_size_t(8), 0)
    libraries = {os.path.join(root, name) for root in (sys.base_prefix, "/usr", "/") for name in ("lib", "lib64")}
    for path in (sys.executable, *filter(os.path.isdir, libraries)):
        execute_and_read = 0b1101 if path in libraries else 0b101
        libc.syscall(445, rules, 1, struct.pack("=Qi", execute_and_read, os.open(path, os.O_PATH)), 0)
    load, equal, above, at_least, answer = 0x20, 0x15, 0x25, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ, JGT, JGE, BPF_RET
    allow, refuse = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50001)  # With EPERM
    # Each with how many lines to skip if it holds, and if not. fcntl's commands from 5 on can have signals sent.
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), refuse, (load, 0, 0, 0)]
    lines += [(equal, 0, 4, fcntl), (load, 0, 0, 24), (at_least, 0, 1, 5), refuse, allow]
    for first, _, last in (span.partition("-") for span in calls.split()):
        lines += [(at_least, 0, 2, int(first)), (above, 1, 0, int(last or first)), allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in (*lines, refuse)))
    call_filter = struct.pack("@HP", len(lines) + 1, ctypes.addressof(code))
    if libc.syscall(446, rules, 0) != 0 or libc.prctl(22, 2, call_filter, 0, 0) != 0:  # PR_SET_SECCOMP
        sys.exit("this system has no sandbox: it takes Linux 6.2 with Landlock and seccomp")
    os.execve(sys.executable, [sys.executable, "-uSsP", "-"], dict(os.environ))


if __name__ == "__main__":
    main()
