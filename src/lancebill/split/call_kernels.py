"""The two kernels around a call of a layer whose experts move, in PTX: they need the order of the whole system.

`begin` counts the call, then copies the map; the mover changes the map, then reads the count. With a fence between both
steps on either side, the mover sees the call or the call sees the new map. What the host reads is only written here:
reading host memory would take a microsecond.
"""

THREADS = 256

PTX = """
.version 7.0
.target sm_80
.address_size 64

// words: begun and ended, in host memory; count: the calls of this stream; clock: those of the layer.
// own and host get the call's maps: where `live` has a place, the expert is the device's, else the host's (`all`).
// uses: for each expert the clock of its last use, after the clock itself, in host memory.
.visible .entry begin(.param .u64 words, .param .u64 count, .param .u64 clock, .param .u64 live, .param .u64 all,
                      .param .u64 own, .param .u64 host, .param .u64 mapped, .param .u64 ids, .param .u64 wide,
                      .param .u64 slots, .param .u64 uses)
{
  .reg .pred p, is_wide;
  .reg .u32 thread, expert;
  .reg .s32 place, other;
  .reg .u64 i, number, from, to, at, most, now, shift, calls;
  .shared .align 8 .u64 shared_now;
  mov.u32 thread, %tid.x;
  setp.ne.u32 p, thread, 0;
  @p bra together;
  ld.param.u64 from, [count];
  ld.param.u64 to, [words];
  ld.global.u64 calls, [from];
  add.u64 calls, calls, 1;
  st.global.u64 [from], calls;
  st.relaxed.sys.global.u64 [to], calls;
  fence.sc.sys;
  ld.param.u64 from, [clock];
  ld.param.u64 to, [uses];
  atom.global.add.u64 now, [from], 1;
  add.u64 now, now, 1;
  st.relaxed.sys.global.u64 [to], now;
  st.shared.u64 [shared_now], now;
together:
  bar.sync 0;
  ld.shared.u64 now, [shared_now];

  cvt.u64.u32 i, thread;
  ld.param.u64 most, [mapped];
maps:
  setp.ge.u64 p, i, most;
  @p bra mapped_all;
  shl.b64 shift, i, 2;
  ld.param.u64 from, [live];
  add.u64 at, from, shift;
  ld.relaxed.sys.global.s32 place, [at];
  ld.param.u64 to, [own];
  add.u64 at, to, shift;
  st.global.s32 [at], place;
  ld.param.u64 from, [all];
  add.u64 at, from, shift;
  ld.global.s32 other, [at];
  setp.ge.s32 p, place, 0;
  selp.s32 other, -1, other, p;
  ld.param.u64 to, [host];
  add.u64 at, to, shift;
  st.relaxed.sys.global.s32 [at], other;
  add.u64 i, i, 256;
  bra maps;

mapped_all:
  cvt.u64.u32 i, thread;
  ld.param.u64 number, [slots];
  ld.param.u64 shift, [wide];
  setp.ne.u64 is_wide, shift, 0;
  ld.param.u64 from, [ids];
  ld.param.u64 to, [uses];
noted:
  setp.ge.u64 p, i, number;
  @p bra ends;
  shl.b64 shift, i, 2;
  @is_wide shl.b64 shift, i, 3;
  add.u64 at, from, shift;
  ld.global.u32 expert, [at];
  cvt.u64.u32 shift, expert;
  setp.ge.u64 p, shift, most;
  @p bra next;
  shl.b64 shift, shift, 3;
  add.u64 at, to, shift;
  st.relaxed.sys.global.u64 [at+8], now;
next:
  add.u64 i, i, 256;
  bra noted;
ends:
  ret;
}

// All kernels of the call have ended: this one stands behind them.
.visible .entry end(.param .u64 words, .param .u64 count)
{
  .reg .pred other;
  .reg .u32 thread;
  .reg .u64 from, to, calls;
  mov.u32 thread, %tid.x;
  setp.ne.u32 other, thread, 0;
  @other bra ends;
  ld.param.u64 from, [count];
  ld.param.u64 to, [words];
  ld.global.u64 calls, [from];
  fence.acq_rel.sys;
  st.release.sys.global.u64 [to+8], calls;
ends:
  ret;
}
"""
