/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slow.c - a keeper that does not get to run, and calls that are interrupted: nothing that was
 * said is lost, nobody waits for longer than was meant, and a keeper that was replaced ends.
 */
#include "tests/kvt.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "kvmd/keep/keep.h"
#include "kvmd/keep/talk.h"

#define MANY 600u /* more than a socket's queue takes */

static char dir[64];
static pid_t pid;
static volatile sig_atomic_t alarms, go_on_at;

static void keeper_start(void)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd;

	strcpy(dir, "/tmp/kvmd-slow-XXXXXX");
	KVT_EXPECT(mkdtemp(dir) != NULL);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%.60s/keeper.sock", dir);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	KVT_EXPECT(fd >= 0 && !bind(fd, (void *)&addr, sizeof(addr)) && !listen(fd, 8));
	pid = fork();
	if (pid == 0)
		_exit(kvd_keeper_main(fd, getppid()));
	close(fd);
}

static void open_keep(struct kvd_keep *k)
{
	bool found;

	memset(k, 0, sizeof(*k));
	KVT_EXPECT_EQ(kvd_keep_open(k, dir, getpid(), &found), 0);
	KVT_EXPECT(found);
}

static void keeper_must_end(void)
{
	int status;

	for (int i = 0; i < 5000; i++) {
		if (waitpid(pid, &status, WNOHANG) == pid) {
			KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
			return;
		}
		usleep(1000);
	}
	kill(pid, SIGKILL);
	KVT_FAIL("the keeper does not end");
}

static void dir_remove(void)
{
	char path[96];

	snprintf(path, sizeof(path), "%s/keeper.sock", dir);
	unlink(path);
	rmdir(dir);
}

static struct kvd_keep_key key_of(u32 index)
{
	return (struct kvd_keep_key){.kind = KVD_KEEP_EXTENT, .pool = 1, .index = index};
}

static int put(struct kvd_keep *k, u32 index)
{
	struct kvd_keep_key key = key_of(index);

	return kvd_keep_put(k, &key, STDIN_FILENO);
}

static void del(struct kvd_keep *k, u32 index)
{
	struct kvd_keep_key key = key_of(index);

	kvd_keep_del(k, &key);
}

static void see(void *arg, const struct kvd_keep_key *key, int fd)
{
	close(fd);
}

static void on_alarm(int sig)
{
	if (++alarms == go_on_at)
		kill(pid, SIGCONT);
}

/* Interrupted again and again, and the @at-th time the keeper runs again; 0 never. */
static void alarms_start(int at)
{
	struct sigaction sa = {.sa_handler = on_alarm};
	struct itimerval it = {{0, 10000}, {0, 10000}};

	alarms = 0;
	go_on_at = at;
	KVT_EXPECT(!sigaction(SIGALRM, &sa, NULL) && !setitimer(ITIMER_REAL, &it, NULL));
}

static void alarms_stop(void)
{
	struct itimerval none = {{0, 0}, {0, 0}};

	KVT_EXPECT(!setitimer(ITIMER_REAL, &none, NULL));
}

/* The queue is full and the wait for room is interrupted: each delete arrives all the same. */
KVT_TEST(interrupted_delete_is_not_lost)
{
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	for (u32 i = 0; i < MANY; i++)
		KVT_EXPECT_EQ(put(&k, i), 0);
	KVT_EXPECT(!kill(pid, SIGSTOP));
	alarms_start(10);
	for (u32 i = 0; i < MANY; i++)
		del(&k, i);
	alarms_stop();
	kill(pid, SIGCONT);
	KVT_EXPECT(!k.silent);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), 0);
	kvd_keep_close(&k, true);
	keeper_must_end();
	dir_remove();
}

/* Neither is a keeper that only was slow given up for it. */
KVT_TEST(interrupted_put_is_answered)
{
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	KVT_EXPECT(!kill(pid, SIGSTOP));
	alarms_start(10);
	KVT_EXPECT_EQ(put(&k, 1), 0);
	alarms_stop();
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), 1);
	kvd_keep_close(&k, true);
	keeper_must_end();
	dir_remove();
}

/* The patience is one for the whole call, however often it is interrupted. */
KVT_TEST(interruptions_do_not_make_it_wait_longer)
{
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	kvd_keep_serving(&k);
	KVT_EXPECT(!kill(pid, SIGSTOP));
	alarms_start(0);
	KVT_EXPECT_EQ(put(&k, 1), -EPIPE);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), -EPIPE);
	alarms_stop();
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	kvd_keep_close(&k, false);
	dir_remove();
}

/* It takes no more: that is noticed once, and not paid for with each delete. Replaced, it ends
 * when it comes to itself, although its queue had no room for the word that it should. */
KVT_TEST(replaced_keeper_with_a_full_queue_ends)
{
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT_EQ(put(&k, i), 0);
	kvd_keep_serving(&k);
	KVT_EXPECT(!kill(pid, SIGSTOP));
	for (u32 i = 0; i < 10 * MANY; i++)
		del(&k, 100 + i);
	KVT_EXPECT(k.silent);
	KVT_EXPECT_EQ(put(&k, 1), -EPIPE);
	k.answer_s = 20;
	KVT_EXPECT_EQ(kvd_keep_restart(&k), 0);
	KVT_EXPECT(!k.silent);
	KVT_EXPECT_EQ(put(&k, 1), 0);
	KVT_EXPECT(!kill(pid, SIGCONT));
	keeper_must_end();
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), 1); /* the new one stays */
	kvd_keep_close(&k, true);
	dir_remove();
}

/* A kvmd that died comes back: a keeper that has its place waits. */
KVT_TEST(keeper_in_its_place_waits_for_the_next_kvmd)
{
	struct kvd_keep k;

	keeper_start();
	for (u32 i = 0; i < 3; i++) {
		open_keep(&k);
		KVT_EXPECT_EQ(put(&k, i), 0);
		kvd_keep_close(&k, false);
		usleep(20000);
		KVT_EXPECT_EQ(waitpid(pid, NULL, WNOHANG), 0);
	}
	open_keep(&k);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), 3);
	kvd_keep_close(&k, true);
	keeper_must_end();
	dir_remove();
}

/* No number is left for what it is given: it says so, and goes on with what it has. */
KVT_TEST(full_keeper_says_so_and_goes_on)
{
	struct rlimit few = {30, 30};
	struct kvd_keep k;
	u32 held = 0;
	int r;

	keeper_start();
	KVT_EXPECT_EQ(prlimit(pid, RLIMIT_NOFILE, &few, NULL), 0);
	open_keep(&k);
	while (!(r = put(&k, held)))
		held++;
	KVT_EXPECT_EQ(r, -ENFILE);
	KVT_EXPECT(held > 10 && held < 30);
	KVT_EXPECT_EQ(put(&k, 1000), -ENFILE);
	del(&k, 0);
	KVT_EXPECT_EQ(put(&k, 1000), 0);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), (int)held);
	kvd_keep_close(&k, true);
	keeper_must_end();
	dir_remove();
}

/* Engines that do not read what kvmd sent them hold descriptors in flight, which are limited for
 * all of a user: that is not the keeper's end. */
KVT_TEST(descriptors_in_flight_are_no_dead_keeper)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC};
	struct rlimit few = {64, 64};
	int unread[2], fd, r;
	struct kvd_keep k;
	u32 sent = 0;

	if (!geteuid()) /* root may have any number */
		KVT_EXPECT(!setresgid(65534, 65534, 65534) &&
			   !setresuid(65534, 65534, 65534));
	keeper_start();
	open_keep(&k);
	KVT_EXPECT_EQ(put(&k, 1), 0);
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &few));
	KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, unread));
	while (sent < 200 && !(r = kvd_keep_say(unread[0], &m, STDIN_FILENO)))
		sent++;
	KVT_EXPECT_EQ(r, -ENFILE);
	KVT_EXPECT_EQ(put(&k, 2), -ENFILE);
	while (sent--) {
		KVT_EXPECT_EQ(kvd_keep_hear(unread[1], &m, 0, &fd), 0);
		close(fd);
	}
	KVT_EXPECT_EQ(put(&k, 2), 0);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, NULL), 2);
	kvd_keep_close(&k, true);
	keeper_must_end();
	dir_remove();
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--keeper-process"))
		_exit(kvd_keeper_main(atoi(argv[2]), atoi(argv[3])));
	return kvt_main(argc, argv);
}
