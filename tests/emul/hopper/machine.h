/* SPDX-License-Identifier: Apache-2.0 */
/* machine.h - what a test says to machine.cc. C and C++. */
#ifndef HOPPER_MACHINE_H
#define HOPPER_MACHINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** hopper_seed() - from now on another order of threads and copies */
void hopper_seed(uint64_t seed);

/** hopper_is() - from now on the device is of this compute capability; 9 at first */
void hopper_is(int major);

/**
 * hopper_has_sms() - from now on the device has so many SMs; 3 at first. As many blocks run at
 * once, if a launch has no more.
 */
void hopper_has_sms(int nr);

/**
 * hopper_begin_late() - from now on some blocks (or clusters) of a launch begin up to so many rounds
 * behind the others; 0: none
 */
void hopper_begin_late(unsigned rounds);

/** hopper_copies_late() - from now on a copy in eight takes so many rounds more; 0: none */
void hopper_copies_late(unsigned rounds);

#ifdef __cplusplus
}
#endif
#endif /* HOPPER_MACHINE_H */
