/* Mailboxes: where a GPU asks for calls, in memory that both can write. A thread of the library makes the calls.
 *
 * Each request has a number. The GPU writes `request`, then `asked`; the thread reads `asked`, makes the call, and
 * answers by writing the same number to `done`. The GPU waits for its own number. If that takes too long, it writes the
 * number to `late` and goes on: an answer that comes later is not taken for that of the next request. But then the late
 * call may have written its sums over rows of the next one, which is answered by a failure.
 */
#ifndef LANCEBILL_MAILBOX_H
#define LANCEBILL_MAILBOX_H

#include "lancebill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 64-byte aligned, zero at first. One request at a time; two that follow each other have different numbers, not 0. */
typedef struct lancebill_mailbox {
  void *request;    /* a lancebill_call */
  uint32_t asked;   /* the number of the request */
  uint32_t done;    /* of the last one that was answered */
  uint32_t late;    /* of the last one that the GPU gave up */
  uint32_t spoiled; /* written by the library: 1 if the last one was given up while it was computed */
} lancebill_mailbox;

#pragma GCC visibility push(default)
/* Serve a mailbox from now on. It must stay where it is until lancebill_unwatch has returned. */
int32_t lancebill_watch(lancebill_mailbox *box);
void lancebill_unwatch(lancebill_mailbox *box);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
