// What laws that hold for every policy are held against.
#pragma once

#include <string>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// Every registered policy, and many with other values or with parts of others.
inline std::vector<std::string> all_policies() {
  std::vector<std::string> all = policies().names();
  for (const char* variant : {
           "streaming-llm:positions=cache",
           "streaming-llm:rolling=true",
           "streaming-llm:sinks=2,rolling=true,positions=cache",
           "truncate:keep_question=false",
           "h2o:heads=query,recent=2",
           "h2o:overlap=true",
           "h2o:schedule=threshold(0.5,0.3)",
           "h2o-online:heads=query,recent=0.2",
           "h2o-online:heads=layer,grow=true",
           "h2o-online:prefill=once",
           "h2o-online:prefill=once,grow=true,heads=layer",
           "snapkv:window=3,pool=none,heads=layer",
           "snapkv:schedule=every(16)",
           "snapkv:window=2,schedule=threshold(0.4,0.2),store=cache",
           "snapkv:window=2,select=chunks,chunk=5",
           "snapkv:window=3,allocate=ranked-layer",
           "snapkv:store=quantised,bits=4,group=8,residual=4",
           "pyramid-kv:window=2,heads=query,beta=5",
           "pyramid-infer:over=all,decay=linear,r=0.4,sinks=1",
           "pyramid-infer:recent=3,decay=constant,r=0.5,distance_weight=3",
           "pyramid-infer:lengths=natural",
           "chunkkv:heads=kv,chunk=7,chunk_score=mean",
           "chunkkv:fill=none,window=2",
           "chunkkv:fill=tokens,window=2,chunk=7",
           "chunkkv:window_mode=replace,chunk=4",
           "chunkkv:store=cache,share=one,layer=0",
           "h2o:heads=layer,select=chunks,chunk=4,window_mode=whole",
           "snapkv:window=3,select=chunks,chunk=7,window_mode=whole,schedule=every(16)",
           "streaming-llm:select=chunks,chunk=3,window_mode=whole,heads=layer",
           "random:heads=layer,sinks=1,window=2,select=chunks,chunk=5,window_mode=whole",
           "hybrid:chunkkv.chunk=3,snapkv.window=2,snapkv.heads=query",
           "dynamickv:window=2,heads=query,update=1",
           "dynamickv:window=2,r_max=1.5,norm=minmax,mid_total=proportional,update=1",
           "dynamickv:progressive=false",
           "sca:use=key,recent=2",
           "sca:objective=max,sinks=1",
           "sca:share=2,use=value",
           "sca:layer=0,positions=cache",
           "sca:schedule=threshold(0.5,0.25)",
           "sca:schedule=threshold(0.5,0.25),recent=2,positions=original",
           "finch:blocks=7,question_tokens=3,question=last",
           "finch:blocks=7,question_tokens=3,question=last,order=relevance,norm=none",
           "finch:blocks=16,question_tokens=2,question=last,heads=kv,condition=all",
           "finch:blocks=9,question_tokens=1,question=last,positions=original,condition=context",
           "finch:blocks=9,question_tokens=2,question=last,rate=code",
           "kivi:bits=4,group=8,residual=5",
           "kivi:bits=8,group=3,residual=0",
           "random:schedule=threshold(0.5,0.25)",
           "random:heads=layer,sinks=2,window=3,schedule=every(11)",
           "strided:schedule=threshold(0.5,0.25)",
           "local:schedule=rolling",
           "local:store=cache",
           "h2o:select=chunks,chunk=3,allocate=pyramid",
           "snapkv:window=3,heads=layer,score=question,schedule=question-blocks(9),question_tokens=3,"
           "question=last",
           "snapkv:window=2,share=every,reuse=2",
           "oracle:scope=layer",
           "oracle:scope=global,heads=layer",
           "oracle:counts=(chunkkv:heads=kv,fill=none,window=2)",
           "layers:0=(chunkkv:chunk=5),1=(h2o:heads=query)",
           "layers:1=(streaming-llm:positions=cache),0=(finch:blocks=7,question_tokens=3,question=last)",
           "layers:0-1=(pyramid-infer:sinks=1),2=(sca:recent=2)",
       })
    all.emplace_back(variant);
  return all;
}

}  // namespace kvreplay
