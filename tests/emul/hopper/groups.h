/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groups.h - cp.async and its groups, for ptx.h. What a thread has asked for is not there before
 * it waits for it, as late as a device may be: a wait that counts wrong reads what was there.
 */
#ifndef HOPPER_GROUPS_H
#define HOPPER_GROUPS_H

#include <map>
#include <utility>
#include <vector>

struct hopper_late {
	uint8_t *to;
	const void *from;
};

/* Of a thread: groups that it has not waited for, the one that is still open last. */
static inline std::vector<std::vector<struct hopper_late>> &hopper_groups(void)
{
	static std::map<std::pair<uint8_t *, unsigned>,
			std::vector<std::vector<struct hopper_late>>>
		all;
	auto &mine = all[{hopper_shared(), threadIdx.x}];

	if (mine.empty())
		mine.emplace_back();
	return mine;
}

/* All but the latest @left groups arrive. */
static inline void hopper_group_wait(size_t left)
{
	auto &mine = hopper_groups();

	while (mine.size() - 1 > left) {
		for (const struct hopper_late &p : mine.front())
			memcpy(p.to, p.from, 16);
		mine.erase(mine.begin());
	}
}

static inline void hopper_group_close(void)
{
	hopper_groups().emplace_back();
}

static inline void ptx_copy16(uint32_t dst, const void *src)
{
	HOPPER_CHECK(dst % 16 == 0 && (uintptr_t)src % 16 == 0);
	hopper_groups().back().push_back({hopper_shared() + dst, src});
}

static inline void ptx_copy_arrive(uint32_t bar)
{
	hopper_group_close();
	hopper_group_wait(0);
	ptx_mbar_arrive(bar);
}

static inline void ptx_copy_commit(void)
{
	hopper_group_close();
}

template <int N> static inline void ptx_copy_wait(void)
{
	hopper_group_wait(N);
}

static inline void step_commit(void)
{
	hopper_group_close();
}

static inline void step_wait_but_one(void)
{
	hopper_group_wait(1);
}

#endif /* HOPPER_GROUPS_H */
