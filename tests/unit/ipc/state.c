/* SPDX-License-Identifier: Apache-2.0 */
/* The state directory: values are durable before they are used, damage stops the start.
 */
#include "kvmd/ipc/state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kv/abi.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "tests/kvt.h"

static char dir[64], path[128], error[256];

static void setup(void)
{
	kvd_log_setup(2, (enum kvd_log_level) - 1);
	strcpy(dir, "/tmp/kvt-state.XXXXXX");
	KVT_EXPECT(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/counters", dir);
}

static void cleanup(void)
{
	static const char *const names[] = {"counters", "counters.new", "lock"};
	char p[128];
	size_t i;

	for (i = 0; i < 3; i++) {
		snprintf(p, sizeof(p), "%s/%s", dir, names[i]);
		unlink(p);
	}
	rmdir(dir);
}

KVT_TEST(saved_values_come_back)
{
	struct kvd_state state;
	struct kvd_env env;

	setup();
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	KVT_EXPECT_EQ(state.saved[KVD_SAVED_GENERATION], 0);
	env = kvd_state_env(&state);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GENERATION, 1ull << 40), 0);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GRACE, 77), 0);
	kvd_state_close(&state);
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	KVT_EXPECT_EQ(state.saved[KVD_SAVED_GENERATION], 1ull << 40);
	KVT_EXPECT_EQ(state.saved[KVD_SAVED_GRACE], 77);
	kvd_state_close(&state);
	cleanup();
}

KVT_TEST(a_damaged_file_stops_the_start)
{
	struct kvd_state state;
	struct kvd_env env;
	u8 byte;
	int fd, i;

	setup();
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	env = kvd_state_env(&state);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GENERATION, 12345), 0);
	kvd_state_close(&state);
	fd = open(path, O_RDWR);
	for (i = 0; i < 32; i++) {
		KVT_EXPECT_EQ(pread(fd, &byte, 1, i), 1);
		byte ^= (u8)(1u << kvt_rand_below(8));
		KVT_EXPECT_EQ(pwrite(fd, &byte, 1, i), 1);
		KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)),
			      -EBADMSG);
		KVT_EXPECT_HAS(error, "counters: damaged");
		KVT_EXPECT_EQ(pread(fd, &byte, 1, i), 1);
		KVT_EXPECT_EQ(ftruncate(fd, 0), 0);
		KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)),
			      -EBADMSG);
		/* a good one again */
		unlink(path);
		close(fd);
		KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
		env = kvd_state_env(&state);
		KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GENERATION, 12345), 0);
		kvd_state_close(&state);
		fd = open(path, O_RDWR);
	}
	close(fd);
	cleanup();
}

KVT_TEST(a_failed_save_leaves_the_old_value)
{
	struct kvd_fault_spec once = {.probability = 1000000, .times = 1};
	struct kvd_state state;
	struct kvd_env env;

	setup();
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	env = kvd_state_env(&state);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GRACE, 5), 0);
	kvd_fault_arm(KVD_FAULT_state_write, &once);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GRACE, 6), -EIO);
	KVT_EXPECT_EQ(state.saved[KVD_SAVED_GRACE], 5);
	KVT_EXPECT_EQ(env.save(env.arg, KVD_SAVED_GRACE, 7), 0);
	kvd_state_close(&state);
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	KVT_EXPECT_EQ(state.saved[KVD_SAVED_GRACE], 7);
	kvd_state_close(&state);
	cleanup();
}

KVT_TEST(one_daemon_per_directory)
{
	struct kvd_state a, b;

	setup();
	KVT_EXPECT_EQ(kvd_state_open(dir, &a, error, sizeof(error)), 0);
	KVT_EXPECT_EQ(kvd_state_open(dir, &b, error, sizeof(error)), -EBUSY);
	KVT_EXPECT_HAS(error, "another kvmd");
	kvd_state_close(&a);
	KVT_EXPECT_EQ(kvd_state_open(dir, &b, error, sizeof(error)), 0);
	kvd_state_close(&b);
	cleanup();
}

/* What kvmctl asks: whose is the lock beside the admin socket? A killed one's is nobody's. */
KVT_TEST(the_end_of_a_daemon_is_seen_at_its_lock)
{
	char admin[80], file[90], long_path[200];
	struct kvd_state state;
	int told[2], status;
	struct flock lock;
	char byte;
	pid_t pid;
	int fd;

	setup();
	snprintf(admin, sizeof(admin), "%s/admin.sock", dir);
	snprintf(file, sizeof(file), "%s" KVMD_ADMIN_LOCK_SUFFIX, admin);
	KVT_EXPECT(!pipe(told));
	pid = fork();
	if (!pid) {
		if (kvd_state_open(dir, &state, error, sizeof(error)) ||
		    kvd_state_alive(&state, admin, error, sizeof(error)))
			_exit(1);
		KVT_EXPECT_EQ(write(told[1], "x", 1), 1);
		for (;;)
			pause();
	}
	KVT_EXPECT_EQ(read(told[0], &byte, 1), 1);
	fd = open(file, O_RDWR);
	lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
	KVT_EXPECT(fd >= 0 && !fcntl(fd, F_GETLK, &lock));
	KVT_EXPECT_EQ(lock.l_type, F_WRLCK);
	KVT_EXPECT_EQ(lock.l_pid, pid);
	/* of another directory, at the same socket */
	state = (struct kvd_state){.dir_fd = -1, .lock_fd = -1, .alive_fd = -1};
	KVT_EXPECT_EQ(kvd_state_alive(&state, admin, error, sizeof(error)), -EADDRINUSE);
	KVT_EXPECT_HAS(error, "another daemon");
	kvd_state_close(&state);
	kill(pid, SIGKILL);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
	KVT_EXPECT(!fcntl(fd, F_GETLK, &lock));
	KVT_EXPECT_EQ(lock.l_type, F_UNLCK);
	KVT_EXPECT_EQ(kvd_state_alive(&state, admin, error, sizeof(error)), 0);
	kvd_state_close(&state);
	memset(long_path, 'x', sizeof(long_path));
	long_path[sizeof(long_path) - 1] = 0;
	KVT_EXPECT_EQ(kvd_state_alive(&state, long_path, error, sizeof(error)),
		      -ENAMETOOLONG);
	close(fd);
	unlink(file);
	cleanup();
}

/* As of a kvmd that was killed between fork and exec: its child has the lock still. */
KVT_TEST(a_lock_that_is_given_up_soon_is_waited_for)
{
	struct kvd_state state;
	int told[2], status;
	char byte;
	pid_t pid;

	setup();
	KVT_EXPECT(!pipe(told));
	pid = fork();
	if (!pid) {
		if (kvd_state_open(dir, &state, error, sizeof(error)) ||
		    write(told[1], "l", 1) != 1)
			_exit(1);
		usleep(300000);
		_exit(0);
	}
	KVT_EXPECT_EQ(read(told[0], &byte, 1), 1);
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	kvd_state_close(&state);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	cleanup();
}

KVT_TEST(a_directory_that_others_may_write_is_refused)
{
	struct kvd_state state;

	setup();
	chmod(dir, 0777);
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), -EPERM);
	KVT_EXPECT_HAS(error, "0777");
	cleanup();
}

/* P2 and facts F-seal, F-0777: nobody but kvmd's own mapping may write a table. */
KVT_TEST(tables_are_sealed)
{
	struct kvd_region r = {.kind = KVD_REGION_TABLE, .size_bytes = 8192};
	struct kvd_state state;
	struct kvd_env env;
	struct stat st;

	setup();
	KVT_EXPECT_EQ(kvd_state_open(dir, &state, error, sizeof(error)), 0);
	env = kvd_state_env(&state);
	KVT_EXPECT_EQ(env.region_alloc(env.arg, &r), 0);
	*(u64 *)r.addr = 7;
	KVT_EXPECT(mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, r.fd, 0) ==
		   MAP_FAILED);
	KVT_EXPECT(write(r.fd, "x", 1) == -1);
	KVT_EXPECT(ftruncate(r.fd, 0) == -1);
	KVT_EXPECT(fallocate(r.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) ==
		   -1);
	KVT_EXPECT(fcntl(r.fd, F_ADD_SEALS, 0) == -1);
	KVT_EXPECT(!fstat(r.fd, &st));
	KVT_EXPECT_EQ(st.st_mode & 07777, 0600);
	KVT_EXPECT_EQ(*(u64 *)r.addr, 7);
	*(u64 *)r.addr = 8;
	env.region_free(env.arg, &r);
	kvd_state_close(&state);
	cleanup();
}

KVT_TEST(fault_points_are_armed_by_text)
{
	char e[256];
	int i, fired = 0;

	KVT_EXPECT_EQ(
		kvd_fault_arm_text("extent_alloc:probability=1000000,interval=3,times=2,"
				   "space=1",
				   e, sizeof(e)),
		0);
	for (i = 0; i < 20; i++)
		fired += kvd_fault(KVD_FAULT_extent_alloc);
	KVT_EXPECT_EQ(fired, 2);
	KVT_EXPECT(!kvd_fault_active);
	KVT_EXPECT_EQ(kvd_fault_arm_text("memfd;nonsense", e, sizeof(e)), -EINVAL);
	KVT_EXPECT_HAS(e, "nonsense");
	KVT_EXPECT(!kvd_fault_active); /* not the first one either */
	KVT_EXPECT_EQ(kvd_fault_arm_text("memfd:often=1", e, sizeof(e)), -EINVAL);
	KVT_EXPECT_HAS(e, "often=1");
	kvd_fault_fail_nth(3);
	for (i = 1; i <= 5; i++)
		KVT_EXPECT_EQ(kvd_fault(KVD_FAULT_memfd), i == 3);
	KVT_EXPECT_EQ(kvd_fault_fired(), 1);
}

KVT_MAIN()
