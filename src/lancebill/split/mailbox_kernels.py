"""The two kernels of a mailbox, in PTX, because they need loads and stores ordered at system scope.

Offsets are those of `lancebill_mailbox`: the request at 0, `done` at 8, `late` at 12. One thread does the work; the
others only fill with NaN what was not computed in time.
"""

PTX = """
.version 7.0
.target sm_80
.address_size 64

// Nothing may be asked for while an answer is awaited, so `done` can be cleared here.
.visible .entry ring(.param .u64 box, .param .u64 call)
{
  .reg .pred other;
  .reg .u32 thread, zero;
  .reg .u64 at, asked;
  mov.u32 thread, %tid.x;
  setp.ne.u32 other, thread, 0;
  @other bra ends;
  ld.param.u64 at, [box];
  ld.param.u64 asked, [call];
  mov.u32 zero, 0;
  st.relaxed.sys.global.u32 [at+8], zero;
  fence.acq_rel.sys;
  st.release.sys.global.u64 [at], asked;
ends:
  ret;
}

.visible .entry wait(.param .u64 box, .param .u64 sums, .param .u64 count, .param .u64 limit)
{
  .reg .pred p;
  .reg .u32 done, thread, nan, one;
  .reg .u64 at, start, now, most, number, end, place;
  ld.param.u64 at, [box];
  ld.param.u64 most, [limit];
  mov.u64 start, %globaltimer;
again:
  ld.acquire.sys.global.u32 done, [at+8];
  setp.ne.u32 p, done, 0;
  @p bra ends;
  nanosleep.u32 200;
  mov.u64 now, %globaltimer;
  sub.u64 now, now, start;
  setp.lt.u64 p, now, most;
  @p bra again;
  mov.u32 one, 1;
  st.relaxed.sys.global.u32 [at+12], one;
  mov.u32 thread, %tid.x;
  mov.u32 nan, 0x7fffffff;
  ld.param.u64 end, [count];
  ld.param.u64 place, [sums];
  cvt.u64.u32 number, thread;
  shl.b64 now, number, 2;
  add.u64 place, place, now;
fill:
  setp.ge.u64 p, number, end;
  @p bra ends;
  st.global.u32 [place], nan;
  add.u64 number, number, 32;
  add.u64 place, place, 128;
  bra fill;
ends:
  ret;
}
"""
