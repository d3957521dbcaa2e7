/* SPDX-License-Identifier: Apache-2.0 */
/* harden.c - see harden.h. Before any thread exists. */
#include "kvmd/harden.h"

#include <errno.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mutant.h"
#include "base/util.h"

/* -------------------------------------------------------------- environment */

void kvd_harden_environment(void)
{
	/* JOURNAL_STREAM: dbg/log.c says a line's level where there is a journal */
	static const char *const keep[] = {
		"PATH",	      "LANG",		"NOTIFY_SOCKET",  "LISTEN_FDS",
		"LISTEN_PID", "LISTEN_FDNAMES", "JOURNAL_STREAM",
#ifdef KV_MUTANTS
		"KV_MUTANT",
#endif
	};
	char *values[KV_ARRAY_SIZE(keep)] = {0};

	if (KV_MUTANT(environment_kept))
		return;
	for (u32 i = 0; i < KV_ARRAY_SIZE(keep); i++) {
		const char *v = getenv(keep[i]);

		values[i] = v ? strdup(v) : NULL;
	}
	clearenv();
	for (u32 i = 0; i < KV_ARRAY_SIZE(keep); i++) {
		if (values[i])
			setenv(keep[i], values[i], 1);
		free(values[i]);
	}
}

/* --------------------------------------------------------------------- user */

static int fail(char *error, size_t bytes, const char *what, const char *which)
{
	int e = errno;

	snprintf(error, bytes, "--user: %s %s: %s", what, which, strerror(e));
	return -e;
}

static int give_dir(const char *dir, mode_t mode, const struct passwd *pw, char *error,
		    size_t bytes)
{
	if (mkdir(dir, mode) && errno != EEXIST)
		return fail(error, bytes, "mkdir", dir);
	if (chown(dir, pw->pw_uid, pw->pw_gid) || chmod(dir, mode))
		return fail(error, bytes, "chown", dir);
	return 0;
}

/* A socket's directory below /run is ours to make; any other is the operator's. */
static int give_socket_dir(const char *path, const struct passwd *pw, char *error,
			   size_t bytes)
{
	char dir[108];
	char *slash;

	snprintf(dir, sizeof(dir), "%s", path);
	slash = strrchr(dir, '/');
	if (!slash || slash == dir)
		return 0;
	*slash = 0;
	/* "/run//s", "/run/x/../s": /run itself is nobody's to give away. */
	if (strncmp(dir, "/run/", 5) || !dir[5] || strstr(dir, "//") || strstr(dir, "/."))
		return 0;
	return give_dir(dir, 0755, pw, error, bytes);
}

static int give_dirs(const struct kvd_harden_paths *paths, const struct passwd *pw,
		     char *error, size_t bytes)
{
	int r = give_dir(paths->state_dir, 0700, pw, error, bytes);

	if (!r)
		r = give_socket_dir(paths->socket_path, pw, error, bytes);
	return r ? r : give_socket_dir(paths->admin_path, pw, error, bytes);
}

static int caps_set(u32 effective)
{
	struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{.effective = effective,
						  .permitted = effective,
						  .inheritable = effective}};

	return syscall(SYS_capset, &head, data) ? -errno : 0;
}

static int become(const struct passwd *pw)
{
	static const u32 kept[] = {CAP_KILL, CAP_IPC_LOCK};
	u32 mask = 0;
	int r;

	/* More than root's soft limit, as long as we may. */
	if (setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}) &&
	    errno != EPERM)
		return -errno;
	if (prctl(PR_SET_KEEPCAPS, 1) || initgroups(pw->pw_name, pw->pw_gid) ||
	    setresgid(pw->pw_gid, pw->pw_gid, pw->pw_gid) ||
	    setresuid(pw->pw_uid, pw->pw_uid, pw->pw_uid))
		return -errno;
	for (u32 i = 0; i < KV_ARRAY_SIZE(kept); i++)
		mask |= 1u << kept[i];
	r = caps_set(mask);
	if (r)
		return r;
	for (u32 i = 0; i < KV_ARRAY_SIZE(kept); i++) {
		if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, kept[i], 0, 0))
			return -errno;
	}
	/* Nobody comes back from here. */
	return setuid(0) ? 0 : -EPERM;
}

int kvd_harden_user(const char *name, const struct kvd_harden_paths *paths, char *error,
		    size_t error_bytes)
{
	const struct passwd *pw;
	int r;

	errno = 0;
	pw = getpwnam(name);
	if (!pw) {
		snprintf(error, error_bytes, "--user \"%s\": no such user", name);
		return -ENOENT;
	}
	if (geteuid() == pw->pw_uid && pw->pw_uid)
		return 0;
	if (geteuid() != 0) {
		snprintf(error, error_bytes,
			 "--user \"%s\": only root can become another user", name);
		return -EPERM;
	}
	if (!pw->pw_uid) {
		snprintf(error, error_bytes, "--user \"%s\": is root itself", name);
		return -EPERM;
	}
	r = paths ? give_dirs(paths, pw, error, error_bytes) : 0;
	if (r)
		return r;
	r = KV_MUTANT(root_kept) ? 0 : become(pw);
	if (r)
		snprintf(error, error_bytes, "--user \"%s\": %s", name, strerror(-r));
	return r;
}

/* ------------------------------------------------------------------ seccomp */

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#endif

static const u16 denied[] = {
	SYS_ptrace,
	SYS_process_vm_readv,
	SYS_process_vm_writev,
	SYS_pidfd_getfd,
	SYS_mount,
	SYS_umount2,
	SYS_pivot_root,
	SYS_chroot,
	SYS_setns,
	SYS_unshare,
	SYS_init_module,
	SYS_finit_module,
	SYS_delete_module,
	SYS_kexec_load,
	SYS_kexec_file_load,
	SYS_reboot,
	SYS_swapon,
	SYS_swapoff,
	SYS_bpf,
	SYS_perf_event_open,
	SYS_userfaultfd,
	SYS_add_key,
	SYS_request_key,
	SYS_keyctl,
	SYS_settimeofday,
	SYS_clock_settime,
	SYS_adjtimex,
	SYS_clock_adjtime,
	SYS_sethostname,
	SYS_setdomainname,
	SYS_acct,
	SYS_quotactl,
	SYS_open_by_handle_at,
	SYS_personality,
	SYS_syslog,
	SYS_vhangup,
	SYS_lookup_dcookie,
};

#define NR_DENIED      KV_ARRAY_SIZE(denied)
#define FIELD(f)       ((u32)offsetof(struct seccomp_data, f))
#define LOAD(f)	       BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FIELD(f))
#define RET(v)	       BPF_STMT(BPF_RET | BPF_K, (v))
#define IS(v, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (v), (yes), (no))

int kvd_harden_seccomp(void)
{
	/* arch, number, [denied], socket(): family, verdicts */
	struct sock_filter code[NR_DENIED + 16];
	struct sock_fprog prog = {.filter = code};
	u16 n = 0;

	if (KV_MUTANT(no_seccomp))
		return 0;
	code[n++] = (struct sock_filter)LOAD(arch);
	code[n++] = (struct sock_filter)IS(ARCH, 1, 0);
	code[n++] = (struct sock_filter)RET(SECCOMP_RET_KILL_PROCESS);
	code[n++] = (struct sock_filter)LOAD(nr);
#ifdef __x86_64__
	/* x32 numbers */
	code[n++] =
		(struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);
	code[n++] = (struct sock_filter)RET(SECCOMP_RET_KILL_PROCESS);
#endif
	for (u32 i = 0; i < NR_DENIED; i++) {
		/* to the EPERM behind the list: what is left of it, and six for socket() */
		code[n++] =
			(struct sock_filter)IS(denied[i], (u8)(NR_DENIED - 1 - i + 6), 0);
	}
	code[n++] = (struct sock_filter)IS(SYS_socket, 0, 4);
	code[n++] = (struct sock_filter)LOAD(args[0]);
	code[n++] = (struct sock_filter)IS(AF_UNIX, 2, 0);
	code[n++] = (struct sock_filter)IS(AF_NETLINK, 1, 0);
	code[n++] = (struct sock_filter)RET(SECCOMP_RET_ERRNO | EAFNOSUPPORT);
	code[n++] = (struct sock_filter)RET(SECCOMP_RET_ALLOW);
	code[n++] = (struct sock_filter)RET(SECCOMP_RET_ERRNO | EPERM);
	prog.len = n;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
		return -errno;
	return 0;
}
